package main

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/sanconn/san"
)

// defaultPort is the port if an address has none.
const defaultPort = "5210"

const targetHelp = `
An address is HOST[:PORT] or san:HOST[:PORT] (through package san), tcp:HOST[:PORT]
(through package net alone) or unix:PATH. A server on a san: address serves tcp: too.
What is measured through package san has moved to a SAN before, if it can.
`

// A target is an address and the way to reach it.
type target struct {
	transport string // "san", "tcp" or "unix"
	address   string // host:port, or a path
}

func (t target) String() string { return t.transport + ":" + t.address }

func parseTarget(text string) (target, error) {
	t := target{"san", text}
	if transport, address, ok := strings.Cut(text, ":"); ok {
		switch transport {
		case "san", "tcp", "unix":
			t = target{transport, address}
		}
	}
	if t.address == "" {
		return t, fmt.Errorf("address %q: empty", text)
	}
	if t.transport == "unix" {
		return t, nil
	}
	_, _, err := net.SplitHostPort(t.address)
	if err == nil {
		return t, nil
	}
	host := t.address
	if strings.HasPrefix(host, "[") && strings.HasSuffix(host, "]") {
		host = host[1 : len(host)-1]
	}
	if _, notIP := netip.ParseAddr(host); notIP != nil && strings.ContainsAny(host, ":[]") {
		return t, fmt.Errorf("address %q: %w", text, err)
	}
	t.address = net.JoinHostPort(host, defaultPort)
	return t, nil
}

// listen opens the listener that serves t.
func (t target) listen(ctx context.Context, policy san.Policy) (net.Listener, error) {
	switch t.transport {
	case "san":
		lc := san.ListenConfig{Policy: policy}
		return lc.Listen(ctx, "tcp", t.address)
	default:
		var lc net.ListenConfig
		return lc.Listen(ctx, t.transport, t.address)
	}
}

// dial opens a connection to t. A connection of package san has moved when dial returns, or will not
// move.
func (t target) dial(ctx context.Context, policy san.Policy) (net.Conn, error) {
	if t.transport != "san" {
		return t.dialShort(ctx)
	}
	d := san.Dialer{Policy: policy}
	d.Options.MoveAtOnce = true
	d.Options.AttemptTimeout = setupTime // only a connection that has moved is measured
	c, err := d.DialContext(ctx, "tcp", t.address)
	if err == nil {
		awaitMove(ctx, c)
	}
	return c, err
}

// dialShort opens a connection with package san's default settings.
func (t target) dialShort(ctx context.Context) (net.Conn, error) {
	if t.transport == "san" {
		return new(san.Dialer).DialContext(ctx, "tcp", t.address)
	}
	return new(net.Dialer).DialContext(ctx, t.transport, t.address)
}

// movePause is the time between two looks at a connection that is about to move. A move takes some 100
// µs.
const movePause = 100 * time.Microsecond

// awaitMove waits while a connection may still move, or until ctx is done.
func awaitMove(ctx context.Context, c net.Conn) {
	for san.InfoOf(c).Fallback == san.ReasonUnused && ctx.Err() == nil {
		time.Sleep(movePause)
	}
}

// providersOf returns what providerOf does, for all connections of a measurement; different results are
// joined. The providers are sorted, because the two ends compare them, and connections may arrive in
// another order than they were made in.
func providersOf(conns []net.Conn) (provider, fallback string) {
	var providers, fallbacks []string
	for _, c := range conns {
		p, f := providerOf(c)
		providers = addNew(providers, p)
		if f != "" {
			fallbacks = addNew(fallbacks, f)
		}
	}
	slices.Sort(providers)
	return strings.Join(providers, "+"), strings.Join(fallbacks, "; ")
}

// providerOf returns what carries c's bytes and, if a SAN was wanted but does not, why.
func providerOf(c net.Conn) (provider, fallback string) {
	info := san.InfoOf(c)
	if info.Fallback != san.ReasonNone {
		fallback = info.Fallback.String()
		if info.Cause != nil {
			fallback += ": " + info.Cause.Error()
		}
	}
	return info.Provider, fallback
}
