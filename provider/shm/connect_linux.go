package shm

import (
	"context"
	"fmt"
	"net/netip"

	"github.com/sanconn/san/session"
)

// connect makes a connection from the dialing end. bound is -1, or the socket that holds
// the connection's address; on success the endpoint owns it.
func (l *link) connect(ctx context.Context, bound int, dialed netip.AddrPort) (*endpoint, error) {
	s, err := l.takeSlot(ctx)
	if err != nil {
		return nil, err
	}
	defer l.release()
	reply := l.slots.connect(s)
	m := &message{kind: msgConnect, number: uint32(s.number), addr: dialed}
	var fds []int
	if bound >= 0 {
		fds = []int{bound}
	}
	if err := l.control.post(ctx, l.gone, m, fds...); err != nil {
		l.slots.replied(m.number, codeRefused) // the peer has not got it
		return nil, linkError(err)
	}
	select {
	case code := <-reply:
		return l.connected(s, bound, code)
	case <-l.gone:
		err = errLinkGone
	case <-ctx.Done():
		err = &session.Unavailable{Reason: session.ReasonTimeout, Err: ctx.Err()}
	}
	l.slots.abandon(s, reply)
	l.door.ring(s.number, session.RecvReady|session.SendReady)
	return nil, err
}

// connected makes the endpoint if the peer's reply allows it.
func (l *link) connected(s *slot, bound int, code uint8) (*endpoint, error) {
	switch code {
	case codeOK:
	case codeClosed: // another listener may have taken over the socket
		l.listenerClosed.Store(true)
		return nil, fmt.Errorf("%w: %w", errLinkGone, codeError(code))
	default:
		return nil, codeError(code)
	}
	e := newEndpoint(l, s, bound)
	if !l.attach(e) {
		e.discard()
		return nil, errLinkGone
	}
	return e, nil
}

// takeSlot returns a fresh slot, from a new segment if need be. The caller becomes a user of
// the link.
func (l *link) takeSlot(ctx context.Context) (*slot, error) {
	if err := l.acquire(); err != nil {
		return nil, err
	}
	for {
		if s := l.slots.take(); s != nil {
			return s, nil
		}
		err := l.extend(ctx)
		if err == nil && l.ended() {
			err = errLinkGone
		}
		if err != nil {
			l.release()
			return nil, err
		}
	}
}
