//go:build !linux

package san

import (
	"context"
	"net"
	"net/netip"
	"syscall"
)

// The question is asked on Linux only.
func isListening(uintptr) (bool, error) { return true, nil }

func setReuseAddr(uintptr) error { return nil }

// boundSocket stands in for Linux's: a listener that nobody dials lends its address to the
// fake provider's connections.
type boundSocket struct {
	net.Listener
	local *net.TCPAddr
}

func bind(ctx context.Context, r request) (*boundSocket, error) {
	var lc net.ListenConfig
	if r.control != nil {
		lc.Control = func(_, _ string, c syscall.RawConn) error {
			return r.control(ctx, r.network, r.remote.String(), c)
		}
	}
	l, err := lc.Listen(ctx, r.network, netip.AddrPortFrom(r.remote.Addr(), 0).String())
	if err != nil {
		return nil, err
	}
	return &boundSocket{l, l.Addr().(*net.TCPAddr)}, nil
}
