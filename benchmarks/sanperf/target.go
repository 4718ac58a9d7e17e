package main

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/sanconn/san"
)

// defaultPort is the port if an address has none.
const defaultPort = "5210"

const targetHelp = `
An address is HOST[:PORT] or san:HOST[:PORT] (through package san), tcp:HOST[:PORT]
(through package net alone) or unix:PATH. A server on a san: address serves tcp: too.
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

// dial opens one connection to t.
func (t target) dial(ctx context.Context, policy san.Policy) (net.Conn, error) {
	switch t.transport {
	case "san":
		d := san.Dialer{Policy: policy}
		return d.DialContext(ctx, "tcp", t.address)
	default:
		var d net.Dialer
		return d.DialContext(ctx, t.transport, t.address)
	}
}

// providersOf is providerOf for all connections of a measurement; results that differ are
// joined. The providers are sorted, because the two ends compare them, and connections may
// arrive in another order than they were made.
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

// providerOf returns what carries c's bytes and, if they were to go by a SAN but do not, why
// not.
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
