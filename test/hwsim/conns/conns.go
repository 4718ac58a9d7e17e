// Package conns makes connections over the simulated device, which is not among the kernel's,
// where package san looks for the one that serves an address: as package san makes them, but
// for that. Only tests and benchmarks/hwsim import it.
package conns

import (
	"context"
	"net"
	"net/netip"
	"time"

	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/provider/verbs"
	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/session"
)

// patience bounds a negotiation.
const patience = 20 * time.Second

// Config is of a listener and its connections, or of a dialer.
type Config struct {
	Verbs   verbs.Config
	Session session.Config
}

// Listen listens on a free port of 127.0.0.1.
func Listen(cfg Config) (net.Listener, error) {
	port, err := FreePort()
	if err != nil {
		return nil, err
	}
	l, err := verbs.Listen(netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port), cfg.Verbs)
	if err != nil {
		return nil, err
	}
	return listener{l, cfg}, nil
}

type listener struct {
	*verbs.Listener
	cfg Config
}

// Accept negotiates, too: a dialer that does not holds up the others.
func (l listener) Accept() (net.Conn, error) {
	for {
		e, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if c, err := negotiate(e, l.cfg); err == nil {
			return c, nil
		}
	}
}

// Addr implements net.Listener.
func (l listener) Addr() net.Addr { return net.TCPAddrFromAddrPort(l.Addrs()[0]) }

// Dial connects to a listener.
func Dial(ctx context.Context, cfg Config, address netip.AddrPort) (*sanconn.Conn, error) {
	e, err := verbs.Dial(ctx, netip.AddrPort{}, address, cfg.Verbs)
	if err != nil {
		return nil, err
	}
	return negotiate(e, cfg)
}

// negotiate makes a connection of an endpoint, at either end.
func negotiate(e *verbs.Endpoint, cfg Config) (*sanconn.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	s := session.New(e, cfg.Session)
	if err := s.Negotiate(ctx); err != nil {
		s.Abort()
		return nil, err
	}
	local, remote := net.TCPAddrFromAddrPort(e.LocalAddr()), net.TCPAddrFromAddrPort(e.RemoteAddr())
	return newconn.New(s, local, remote, nil).(*sanconn.Conn), nil
}

// FreePort returns a port of 127.0.0.1 that nobody uses.
func FreePort() (uint16, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).AddrPort().Port(), nil
}
