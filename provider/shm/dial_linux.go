package shm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"

	"github.com/sanconn/san/session"
)

// linkTries is how many links a Dial tries when they end before they answer.
const linkTries = 3

// Dial connects to the listener that a TCP connect to raddr would reach. bound
// is a TCP socket that the caller made and bound to the connection's local
// address; it is never connected. On success it belongs to the endpoint, which
// closes it; on failure it is still the caller's.
//
// The error matches syscall.ECONNREFUSED if the listener's backlog is full, and is a
// *session.Unavailable otherwise. Dial does not wait for Accept. It is bounded by ctx and
// by cfg.Timeout, and safe for concurrent use.
func Dial(ctx context.Context, bound int, raddr *net.TCPAddr, cfg Config) (session.Endpoint, error) {
	cfg = cfg.withDefaults()
	to := unmap(raddr.AddrPort())
	if err := ServedBy(to.Addr(), cfg); err != nil {
		return nil, &session.Unavailable{Reason: session.ReasonNotServed, Err: err}
	}
	from, err := boundAddr(bound)
	if err == nil {
		err = ServedBy(from.Addr(), cfg) // otherwise the acceptor would refuse it
	}
	if err != nil {
		return nil, &session.Unavailable{Reason: session.ReasonNotServed, Err: err}
	}
	if from.Addr().Is4() != to.Addr().Is4() {
		return nil, &session.Unavailable{Reason: session.ReasonNotServed,
			Err: fmt.Errorf("shm: a socket bound to %v cannot connect to %v", from, to)}
	}
	ctx, cancel := context.WithTimeout(ctx, cfg.Timeout)
	defer cancel()
	// A link may end while we use it, or the other end may give up on it because this
	// process was slow. Then a new one may do.
	for try := 1; ; try++ {
		o, err := findListener(from, to)
		if errors.Is(err, errNotFound) {
			// TCP may still connect: a firewall rule may redirect it.
			return nil, &session.Unavailable{Reason: session.ReasonNoListener,
				Err: fmt.Errorf("shm: nobody listens on %v: %w", to, syscall.ECONNREFUSED)}
		}
		if err != nil {
			return nil, unavailable(err)
		}
		l, err := dialed.get(ctx, o, cfg)
		if err == nil {
			var e *endpoint
			if e, err = l.connect(ctx, bound, to); err == nil {
				return e, nil
			}
		}
		if l == nil && (errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded)) && ctx.Err() == nil {
			try-- // the dial that first asked for the link had a shorter timeout
			continue
		}
		if !errors.Is(err, errLinkGone) || try == linkTries || ctx.Err() != nil {
			if errors.Is(err, syscall.ECONNREFUSED) && !errors.As(err, new(*session.Unavailable)) {
				return nil, err
			}
			return nil, unavailable(err)
		}
	}
}

func unmap(ap netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}
