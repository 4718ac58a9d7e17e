package session_test

import (
	"errors"
	"io"
	"syscall"

	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/session"
)

// check compares what happened with what may happen.
func (m *sim) check() {
	for _, v := range m.violations {
		if v.Kind == twin.RevokedAccess && m.end != orderly {
			continue // the owner of the memory has ended the connection
		}
		m.errorf("%v", v)
	}
	for _, p := range m.sides {
		exposed := 0
		if l := m.net.PeerLimits; m.net.Limits.Inbox > 0 || l != nil && l.Inbox > 0 {
			exposed = 1 // an inbox may end with the endpoint: Close may come before a goroutine that revokes an inbox which was left
		}
		if left := p.ep.Left(); left.Allocated != 0 || left.Exposed > exposed && m.end == orderly {
			m.errorf("%d: left behind: %+v", p.id, left)
		}
		if !p.ep.Retired() {
			m.errorf("%d: the endpoint was not given back", p.id)
		}
		if to, saw := p.movedTo.Load(), p.peer().peerMove.Load(); saw != to && (saw >= 0 || m.end == orderly) {
			m.errorf("%d: it has moved back at %d, and the peer has seen %d", p.id, to, saw)
		}
		p.checkReading()
		p.checkWriting()
	}
}

func (p *party) checkReading() {
	sent := p.peer().accepted.Load()
	ended := p.who == p.id // this end ended the connection
	err := p.readErr
	switch {
	case errors.Is(err, io.EOF):
		if at := p.s.ReadPosition(); int64(at) != p.received {
			p.errorf("%d: %d bytes were read, the position is %d", p.id, p.received, at)
		}
		switch {
		case p.end == death && !ended:
			if p.received < sent {
				p.errorf("%d: EOF after %d bytes of %d", p.id, p.received, sent)
			}
		case p.received != sent:
			p.errorf("%d: EOF after %d bytes of %d", p.id, p.received, sent)
		}
	case errors.Is(err, session.ErrClosed):
		if !ended || p.end != earlyClose && p.end != earlyAbort {
			p.errorf("%d: reading ended with %v", p.id, err)
		}
	case errors.Is(err, syscall.ECONNRESET):
		if p.end == orderly || p.end == lastByte || p.end == cutWire {
			p.errorf("%d: reading ended with %v", p.id, err)
		}
		if p.end == earlyClose && p.received != sent {
			// The peer closed with unread data; what it had written comes before the reset.
			p.errorf("%d: reset after %d bytes of %d", p.id, p.received, sent)
		}
	case errors.Is(err, syscall.ETIMEDOUT):
		if p.end != cutWire {
			p.errorf("%d: reading ended with %v", p.id, err)
		}
	default:
		if p.end != death && p.end != cutWire { // negotiation may have failed
			p.errorf("%d: reading ended with %v", p.id, err)
		}
	}
	if p.received > p.peer().total {
		p.errorf("%d: %d bytes of %d", p.id, p.received, p.peer().total)
	}
}

func (p *party) checkWriting() {
	ended := p.who == p.id
	ok := false
	switch err := p.writeErr; {
	case err == nil:
		ok = true
	case p.end == orderly:
	case errors.Is(err, session.ErrClosed):
		ok = ended && (p.end == earlyClose || p.end == earlyAbort)
	case errors.Is(err, syscall.EPIPE): // another call may have returned any other error before
		ok = true
	case errors.Is(err, syscall.ECONNRESET):
		ok = p.end != cutWire
	case errors.Is(err, syscall.ETIMEDOUT):
		ok = p.end == cutWire
	default:
		ok = p.end == death || p.end == cutWire
	}
	if !ok {
		p.errorf("%d: writing ended with %v", p.id, p.writeErr)
	}
}
