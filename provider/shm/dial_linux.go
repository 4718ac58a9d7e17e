package shm

import (
	"context"
	"errors"
	"os"
	"time"

	"github.com/sanconn/san/session"
)

// Dial connects to the process of this host that listens under a name, which has to be the
// user uid's. The error is a *session.Unavailable: with ReasonNoListener where nobody has the
// name, and with ReasonOwner where another user's process has; either costs a few microseconds.
//
// With cfg.Dir, the name is one in that directory, and any user's.
//
// It does not wait until that process has taken the connection, nor that it is there to do so:
// the endpoint fails with a *session.Unavailable if it does not. Both that and Dial may fail
// with ErrLinkGone, as the process that had the name has ended or given it up: then another one
// may have it.
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
	if err := ctx.Err(); err != nil {
		return nil, unavailable(err)
	}
	var d dialing
	if err := d.connect(ctx, key, cfg); err != nil {
		if errors.Is(err, ErrLinkGone) && d.link != nil {
			d.link.listenerClosed.Store(true) // though nothing else here may have noticed yet
		}
		return nil, unavailable(err)
	}
	return d.e, nil
}

// dialing is an attempt to connect: locate the link, create the endpoint, send the connect.
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
	if err := d.send(ctx); err != nil {
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
			return ErrLinkGone
		}
	}
	d.e = newEndpoint(d.link, d.slot, (d.slot.turn.Load()+turnUnit)&turnMask)
	if d.link.attach(d.e) != codeOK {
		d.e.discard()
		return ErrLinkGone
	}
	d.e.begin()
	return nil
}

// send sends the connect.
func (d *dialing) send(ctx context.Context) error {
	l := d.link
	l.slots.ask(d.slot)
	err := l.control.post(ctx, l.gone, &message{kind: msgConnect, number: uint32(d.slot.number)})
	if err != nil {
		l.slots.refuse(d.slot) // the peer has not got it
		return linkError(err)
	}
	return nil
}
