package shm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"
	"time"

	"github.com/sanconn/san/session"
)

// linkTries is how many links a Dial tries when they end before they answer: that of a
// listener that ends, one that was about to be made with it, and the same again with the
// one that takes over, which moves up in line.
const linkTries = 5

// Dial connects to the listener that a TCP connect to raddr would reach. bound
// is a TCP socket that the caller made and bound to the connection's local
// address; it is never connected. On success it belongs to the endpoint, which
// closes it; on failure it is still the caller's.
//
// The error is a *session.Unavailable. Dial does not wait for Accept. It is bounded by ctx and
// by cfg.Timeout, and safe for concurrent use.
func Dial(ctx context.Context, bound int, raddr *net.TCPAddr, cfg Config) (session.Endpoint, error) {
	cfg = cfg.withDefaults()
	remote := unmap(raddr.AddrPort())
	local, err := servedEnds(bound, remote, cfg)
	if err != nil {
		return nil, &session.Unavailable{Reason: session.ReasonNotServed, Err: err}
	}
	if err := mayConnect(bound, remote); err != nil {
		return nil, &session.Unavailable{Reason: session.ReasonPermission, Err: err}
	}
	if err := diagWorks(); err != nil {
		return nil, err
	}
	diag, err := diags.get(bound)
	if err != nil {
		return nil, unavailable(err)
	}
	defer diags.drop(diag)
	if deadline, ok := ctx.Deadline(); !ok || time.Until(deadline) > cfg.Timeout {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, cfg.Timeout)
		defer cancel()
	}
	for try := 1; ; try++ {
		d := dialing{cfg: cfg, diag: diag, bound: bound, local: local, remote: remote}
		err := d.connect(ctx)
		switch {
		case err == nil:
			return d.e, nil
		case errors.Is(err, errLinkGone) && try < linkTries && ctx.Err() == nil:
			// A link may end while we use it, or the other end may give up on it because
			// this process was slow. Then a new one may do.
			if d.link != nil {
				d.link.listenerClosed.Store(true) // though nothing else here may have noticed yet
			}
		case errors.Is(err, syscall.ECONNREFUSED) && !errors.As(err, new(*session.Unavailable)):
			return nil, err
		default:
			return nil, unavailable(err)
		}
	}
}

func unmap(ap netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}

// servedEnds returns the address that a socket is bound to, if both this and the remote
// one are served.
func servedEnds(bound int, remote netip.AddrPort, cfg Config) (local netip.AddrPort, err error) {
	if err := ServedBy(remote.Addr(), cfg); err != nil {
		return local, err
	}
	if local, err = boundName(bound); err != nil {
		return local, err
	}
	if err := ServedBy(local.Addr(), cfg); err != nil {
		return local, err // the acceptor would refuse it
	}
	if local.Addr().Is4() != remote.Addr().Is4() {
		return local, fmt.Errorf("shm: a socket bound to %v cannot connect to %v", local, remote)
	}
	return local, nil
}

// dialing is an attempt to connect. Its steps are those of accepting at the other end:
// locate the link, create the endpoint, exchange messages, finish.
type dialing struct {
	cfg           Config
	diag          *sharedDiag
	bound         int // -1, or the socket that holds the local address
	local, remote netip.AddrPort

	link *link
	slot *slot
	e    *endpoint // owns bound once connected
}

func (d *dialing) connect(ctx context.Context) error {
	if err := d.locate(ctx); err != nil {
		return err
	}
	return d.connectOverLink(ctx)
}

func (d *dialing) connectOverLink(ctx context.Context) error {
	if err := d.link.acquire(); err != nil {
		return err
	}
	defer d.link.release()
	if err := d.create(ctx); err != nil {
		return err
	}
	end := d.begin()
	if err := d.exchange(ctx); err != nil {
		end()
		return err
	}
	d.finish()
	return nil
}

// locate finds the listener, and a link with its process.
func (d *dialing) locate(ctx context.Context) error {
	for {
		o, err := d.diag.find(d.local, d.remote)
		if errors.Is(err, errNotFound) {
			// TCP may still connect: a firewall rule may redirect it.
			return &session.Unavailable{Reason: session.ReasonNoListener,
				Err: fmt.Errorf("shm: nobody listens on %v: %w", d.remote, syscall.ECONNREFUSED)}
		}
		if err != nil {
			return unavailable(err)
		}
		d.link, err = dialed.get(ctx, o, d.cfg, d.diag)
		if !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, os.ErrDeadlineExceeded) || ctx.Err() != nil {
			return err
		}
		// The dial that first asked for the link had a shorter timeout.
	}
}

// create makes the endpoint in a fresh slot, from a new segment if need be.
func (d *dialing) create(ctx context.Context) error {
	for {
		if d.slot = d.link.slots.take(); d.slot != nil {
			break
		}
		if err := d.link.extend(ctx); err != nil {
			return err
		}
		if d.link.ended() {
			return errLinkGone
		}
	}
	d.e = newEndpoint(d.link, d.slot, -1)
	if d.link.attach(d.e) != codeOK {
		d.e.discard()
		return errLinkGone
	}
	return nil
}

// begin has the caller begin to use the endpoint.
func (d *dialing) begin() (end func()) {
	if d.cfg.Begin != nil {
		return d.cfg.Begin(d.e)
	}
	return func() {
		d.e.Abort()
		d.e.Retire()
	}
}

// exchange sends the connect and waits for the reply.
func (d *dialing) exchange(ctx context.Context) error {
	l := d.link
	reply := l.slots.connect(d.slot)
	m := &message{kind: msgConnect, code: connectQuietly, number: uint32(d.slot.number), addr: d.remote}
	var fds []int
	if d.bound >= 0 {
		fds = []int{d.bound}
	}
	if err := l.control.post(ctx, l.gone, m, fds...); err != nil {
		l.slots.replied(m.number, codeRefused) // the peer has not got it
		return linkError(err)
	}
	code, err := d.answer(ctx, reply)
	if code == codeClosed { // another listener may have taken over the socket
		return fmt.Errorf("%w: %w", errLinkGone, codeError(code))
	}
	return cmp.Or(err, codeError(code))
}

// finish gives the endpoint the socket.
func (d *dialing) finish() { d.e.bound = d.bound }
