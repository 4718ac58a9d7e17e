package shm

import (
	"context"
	"errors"
	"os"

	"github.com/sanconn/san/session"
)

// Dial connects to the process of this host that listens under a name of a port, which has to be
// the user uid's. The error is a *session.Unavailable: with ReasonNoListener where nobody has the
// name, and with ReasonOwner where another user's process has; either costs a few microseconds.
//
// With cfg.Dir, the name is one in that directory, and any user's.
//
// It does not wait until that process has taken the connection, nor that it is there to do so:
// the endpoint fails with a *session.Unavailable if it does not. Both that and Dial may fail
// with ErrLinkGone, as the process that had the name has ended or given it up: then another one
// may have it.
//
// Dial is bounded by ctx and to half a second, and safe for concurrent use.
func Dial(ctx context.Context, port uint16, name string, uid uint32, cfg Config) (session.Endpoint, error) {
	cfg = cfg.withDefaults()
	if cfg.Dir == "" && !oneUser(uid) {
		return nil, &session.Unavailable{Reason: session.ReasonOwner, Err: errUserUnknown}
	}
	ctx, cancel := context.WithTimeout(ctx, cfg.timeout)
	defer cancel()
	key := keyOf(port, name, uid, cfg)
	if err := ctx.Err(); err != nil {
		return nil, unavailable(err)
	}
	l, err := locate(ctx, key, cfg)
	if err != nil {
		return nil, unavailable(err)
	}
	e, err := l.dial(ctx)
	if err != nil {
		if errors.Is(err, ErrLinkGone) {
			l.listenerClosed.Store(true) // though nothing else here may have noticed yet
		}
		return nil, unavailable(err)
	}
	return e, nil
}

func keyOf(port uint16, name string, uid uint32, cfg Config) linkKey {
	key := linkKey{port: port, name: name, dir: cfg.Dir}
	if cfg.Dir == "" {
		key.namespace, key.user = NetworkNamespace(), uid
	}
	return key
}

// locate finds a link with the process.
func locate(ctx context.Context, key linkKey, cfg Config) (*link, error) {
	for {
		l, err := dialed.get(ctx, key, cfg)
		if !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, os.ErrDeadlineExceeded) || ctx.Err() != nil {
			return l, err
		}
		// The dial that first asked for the link did so earlier, and its time is over.
	}
}

// dial connects over the link.
func (l *link) dial(ctx context.Context) (*endpoint, error) {
	if err := l.acquire(); err != nil {
		return nil, err
	}
	defer l.release()
	if !l.slots.memory.HasSure() {
		return nil, errNoMemory
	}
	s, err := l.freshSlot(ctx)
	if err != nil {
		return nil, err
	}
	e := newEndpoint(l, s, (s.turn.Load()+turnUnit)&turnMask)
	if l.attach(e) != codeOK {
		e.discard()
		return nil, ErrLinkGone
	}
	e.begin()
	l.slots.noteAsked(s)
	if err := l.control.post(ctx, &message{kind: msgConnect, number: uint32(s.number)}); err != nil {
		l.slots.noteRefused(s) // the peer has not got it
		e.Abort()
		e.Retire()
		return nil, linkError(err)
	}
	return e, nil
}

// freshSlot takes a slot that nobody uses, from a new segment if need be.
func (l *link) freshSlot(ctx context.Context) (*slot, error) {
	for {
		have := len(l.slots.list())
		if s := l.slots.allocate(); s != nil {
			return s, nil
		}
		if err := l.extend(ctx, have); err != nil {
			return nil, err
		}
		if l.over() {
			return nil, ErrLinkGone
		}
	}
}
