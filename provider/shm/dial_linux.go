package shm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/sanconn/san/session"
)

// linkTries is how many links a Dial tries when they end before they answer: one that was
// there, of a process that has ended since, and one that is made afresh.
const linkTries = 2

// Dial connects to the process of this host that listens under a name, which has to be the
// user uid's. The error is a *session.Unavailable: with ReasonNoListener where nobody has the
// name, and with ReasonOwner where another user's process has; either costs a few microseconds.
//
// With cfg.Dir, the name is one in that directory, and any user's.
//
// Dial is bounded by ctx and by cfg.Timeout, and safe for concurrent use.
func Dial(ctx context.Context, port uint16, number int, uid uint32, cfg Config) (session.Endpoint, error) {
	cfg = cfg.withDefaults()
	if cfg.Dir == "" && !oneUser(uid) {
		return nil, &session.Unavailable{Reason: session.ReasonOwner, Err: errUserUnknown}
	}
	if deadline, ok := ctx.Deadline(); !ok || time.Until(deadline) > cfg.Timeout {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, cfg.Timeout)
		defer cancel()
	}
	key := linkKey{port: port, number: number, dir: cfg.Dir}
	if cfg.Dir == "" {
		key.namespace, key.user = networkNamespace(), uid
	}
	for try := 1; ; try++ {
		var d dialing
		err := d.connect(ctx, key, cfg)
		switch {
		case err == nil:
			return d.e, nil
		case errors.Is(err, errLinkGone) && try < linkTries && ctx.Err() == nil:
			// A link may end while we use it, or the other end may give up on it because
			// this process was slow. Then a new one may do.
			if d.link != nil {
				d.link.listenerClosed.Store(true) // though nothing else here may have noticed yet
			}
		default:
			return nil, unavailable(err)
		}
	}
}

// dialing is an attempt to connect: locate the link, create the endpoint, exchange messages.
type dialing struct {
	link *link
	slot *slot
	e    *endpoint
}

func (d *dialing) connect(ctx context.Context, key linkKey, cfg Config) error {
	if err := d.locate(ctx, key, cfg); err != nil {
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
	if err := d.exchange(ctx); err != nil {
		d.e.Abort()
		d.e.Retire()
		return err
	}
	return nil
}

// locate finds a link with the process.
func (d *dialing) locate(ctx context.Context, key linkKey, cfg Config) (err error) {
	for {
		d.link, err = dialed.get(ctx, key, cfg)
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
	d.e = newEndpoint(d.link, d.slot)
	if d.link.attach(d.e) != codeOK {
		d.e.discard()
		return errLinkGone
	}
	return nil
}

// exchange sends the connect and waits for the reply.
func (d *dialing) exchange(ctx context.Context) error {
	l := d.link
	reply := l.slots.connect(d.slot)
	m := &message{kind: msgConnect, number: uint32(d.slot.number)}
	if err := l.control.post(ctx, l.gone, m); err != nil {
		l.slots.replied(m.number, codeResources) // the peer has not got it
		return linkError(err)
	}
	select {
	case code := <-reply:
		if code == codeClosed { // another process may have the name by now
			return fmt.Errorf("%w: %w", errLinkGone, codeError(code))
		}
		return codeError(code)
	case <-l.gone:
		return errLinkGone
	case <-ctx.Done():
		return unavailable(ctx.Err())
	}
}
