package shm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

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

// dialed are the links of which this process is the dialing end.
var dialed linkCache

// linkCache holds one link per listener and configuration of endpoints.
type linkCache struct {
	mu    sync.Mutex // guards links
	links map[linkKey]*linkEntry
}

type linkKey struct {
	owner
	ringMax int
}

// linkEntry is a link, or the making of it.
type linkEntry struct {
	ready chan struct{} // closed when what follows is set
	link  *link
	err   error
}

// ended reports whether a new link is needed: this one failed, or takes no more
// connections.
func (e *linkEntry) ended() bool {
	select {
	case <-e.ready:
		return e.link == nil || e.link.ended() || e.link.shut.Load()
	default:
		return false
	}
}

// get returns the link to a listener, and makes it if need be. Making it is bounded by the
// cfg.Timeout of the first dial that asks, and does not depend on any dial's ctx.
func (c *linkCache) get(ctx context.Context, o owner, cfg Config) (*link, error) {
	key := linkKey{owner: o, ringMax: cfg.RingMax}
	c.mu.Lock()
	entry := c.links[key]
	if entry == nil || entry.ended() {
		entry = &linkEntry{ready: make(chan struct{})}
		if c.links == nil {
			c.links = make(map[linkKey]*linkEntry)
		}
		c.links[key] = entry
		go c.make(key, entry, cfg)
	}
	c.mu.Unlock()
	select {
	case <-entry.ready:
		return entry.link, entry.err
	case <-ctx.Done():
		return nil, unavailable(ctx.Err())
	}
}

// make makes a link. Its entry is removed when that fails or when the link ends.
func (c *linkCache) make(key linkKey, entry *linkEntry, cfg Config) {
	entry.link, entry.err = connectLink(key.owner, cfg)
	if entry.err == nil {
		entry.link.onGone(func() { c.forget(key, entry) })
	} else {
		c.forget(key, entry)
	}
	close(entry.ready)
	if entry.err == nil {
		entry.link.leave()
	}
}

func (c *linkCache) forget(key linkKey, entry *linkEntry) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.links[key] == entry {
		delete(c.links, key)
	}
}

func connectLink(o owner, cfg Config) (*link, error) {
	ctx, cancel := context.WithTimeout(context.Background(), cfg.Timeout)
	defer cancel()
	var d net.Dialer
	name := rendezvous(o.inode)
	c, err := d.DialContext(ctx, name.Net, name.Name)
	if err != nil {
		return nil, unavailable(err)
	}
	l, err := open(ctx, c.(*net.UnixConn), o.uid, cfg)
	if err != nil {
		return nil, linkError(err)
	}
	return l, nil
}

// linkError marks errors that mean that the other end closed the link.
func linkError(err error) error {
	if isGone(err) {
		return fmt.Errorf("%w: %w", errLinkGone, err)
	}
	return unavailable(err)
}

// isGone reports whether an error means that there is nobody at the other end.
func isGone(err error) bool {
	for _, gone := range []error{errPeerGone, io.EOF, unix.EPIPE, unix.ECONNRESET, net.ErrClosed} {
		if errors.Is(err, gone) {
			return true
		}
	}
	return false
}
