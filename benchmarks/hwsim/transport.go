package main

import (
	"context"
	"net"
	"net/netip"

	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/provider/verbs"
	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/session"
)

// The simulated device is not among the kernel's, where package san looks for the one that
// serves an address. So connections are made here as it makes them, but for that.

func (o options) verbs() verbs.Config {
	return verbs.Config{Disable: session.FeatureNames[o.disable]}
}

func listen(o options) (*verbs.Listener, error) {
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	return verbs.Listen(netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port), o.verbs())
}

func dial(o options, address netip.AddrPort) (*sanconn.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	e, err := verbs.Dial(ctx, netip.AddrPort{}, address, o.verbs())
	if err != nil {
		return nil, err
	}
	return connection(o, e)
}

// connection negotiates, at either end.
func connection(o options, e *verbs.Endpoint) (*sanconn.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	s := session.New(e, session.Config{Spin: o.spin, Disable: session.FeatureNames[o.disable]})
	if err := s.Negotiate(ctx); err != nil {
		s.Abort()
		return nil, err
	}
	local, remote := net.TCPAddrFromAddrPort(e.LocalAddr()), net.TCPAddrFromAddrPort(e.RemoteAddr())
	return newconn.New(s, local, remote, nil).(*sanconn.Conn), nil
}
