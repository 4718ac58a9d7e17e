package shm

import (
	"context"
	"errors"
	"os"

	"github.com/sanconn/san/session"
)

// Dial connects to the process of this host that listens under one of a port's names, and whose user
// must be uid. With cfg.Dir, the name is one in that directory, and the user is not compared.
//
// The error is a *session.Unavailable: with ReasonNoListener if no process has the name, with
// ReasonOwner if another user's process has it; each takes a few microseconds.
//
// Dial does not wait until that process has accepted the connection, nor check that it can: if it does
// not, the endpoint fails with a *session.Unavailable. Dial and the endpoint may fail with ErrLinkGone,
// if the process has ended or given up the name; another process may have the connection's other end
// then.
//
// Dial takes at most until ctx ends, and at most half a second. It is safe for concurrent use.
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
			l.listenerClosed.Store(true) // nothing else in this process may have noticed yet
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

// locate returns a link with the process, and makes one if there is none.
func locate(ctx context.Context, key linkKey, cfg Config) (*link, error) {
	for {
		l, err := dialed.get(ctx, key, cfg)
		if !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, os.ErrDeadlineExceeded) || ctx.Err() != nil {
			return l, err
		}
		// Another dial has begun to make the link, and its time was over first.
	}
}

// dial makes a connection on the link.
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
		l.slots.noteRefused(s) // the peer has not received the connect
		e.Abort()
		e.Retire()
		return nil, linkError(err)
	}
	return e, nil
}

// freshSlot returns a slot that neither side uses, from a new segment if necessary.
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
