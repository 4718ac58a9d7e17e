package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/pires/go-proxyproto"

	"github.com/sanconn/san"
)

// The networks of addresses.
const (
	sanNetwork  = "san"
	tcpNetwork  = "tcp"
	unixNetwork = "unix"
)

// address is where to listen or to connect to.
type address struct {
	network string
	address string // host and port, or a path
}

func (a address) String() string { return a.network + ":" + a.address }

func parseAddress(text string) (address, error) {
	network, rest, _ := strings.Cut(text, ":")
	a := address{network, rest}
	switch network {
	case unixNetwork:
		if rest == "" || rest == "@" {
			return a, errors.New("no path")
		}
	case sanNetwork, tcpNetwork:
		_, port, err := net.SplitHostPort(rest)
		if err == nil {
			_, err = net.LookupPort("tcp", port)
		}
		if err != nil {
			return a, fmt.Errorf("%w; it must be %s:HOST:PORT", err, network)
		}
	default:
		return a, errors.New("it must begin with san:, tcp: or unix:")
	}
	return a, nil
}

// open listens on an address. The error names it.
func (s *settings) open(ctx context.Context, a address) (l net.Listener, err error) {
	switch a.network {
	case sanNetwork:
		lc := san.ListenConfig{Policy: s.policy}
		l, err = lc.Listen(ctx, "tcp", a.address)
	case unixNetwork:
		l, err = listenUnix(ctx, a.address, s.mode)
	default:
		l, err = new(net.ListenConfig).Listen(ctx, a.network, a.address)
	}
	if err != nil {
		return nil, fmt.Errorf("cannot listen on %v: %w", a, err)
	}
	return l, nil
}

// dialer returns what connects to an address, and sends the PROXY header if there is to be one.
func (s *settings) dialer(a address) func(context.Context, net.Conn) (net.Conn, error) {
	tcp := net.Dialer{Control: resetAtDeath}
	var d interface {
		DialContext(ctx context.Context, network, address string) (net.Conn, error)
	} = &tcp
	network := a.network
	if network == sanNetwork {
		d, network = &san.Dialer{NetDialer: tcp, Policy: s.policy}, "tcp"
	}
	return func(ctx context.Context, client net.Conn) (net.Conn, error) {
		c, err := d.DialContext(ctx, network, a.address)
		if err != nil || !s.proxyHeader {
			return c, err
		}
		if err := sendHeader(ctx, c, client); err != nil {
			c.Close()
			return nil, err
		}
		return c, nil
	}
}

// sendHeader sends c's peer both addresses of client.
func sendHeader(ctx context.Context, c, client net.Conn) error {
	end, _ := ctx.Deadline()
	c.SetWriteDeadline(end)
	h := proxyproto.HeaderProxyFromAddrs(2, client.RemoteAddr(), client.LocalAddr())
	if _, err := h.WriteTo(c); err != nil {
		return fmt.Errorf("PROXY header: %w", err)
	}
	return c.SetWriteDeadline(time.Time{})
}
