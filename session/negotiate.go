package session

import (
	"context"
	"errors"
	"fmt"
)

// introduce sends the negotiation message unless it was sent already. It reports
// false if there is no room for it.
func (s *Session) introduce() (sent bool) {
	s.tx.mu.Lock()
	defer s.tx.mu.Unlock()
	if s.gone || s.tx.sent != 0 {
		return true
	}
	room := s.ep.ReserveControl(headerLen + paramsLen)
	if room == nil {
		return false
	}
	p := params{version: version, maxMsg: uint32(s.lim.MaxMessage), caps: s.caps}
	if s.lim.Window != 0 {
		p.credits = s.granted()
	}
	putHeader(room, msgNegotiate, 0, 0)
	p.put(room[headerLen:])
	s.ep.CommitControl(headerLen + paramsLen)
	s.tx.sent, s.tx.messages = 1, 1
	return true
}

// Negotiate waits until the peer's negotiation message has come and was
// understood (N4), or ctx is done. After an error the session can only be aborted.
// An *Unavailable error with ReasonVersion or ReasonProtocol means that the peer
// does not speak this protocol.
func (s *Session) Negotiate(ctx context.Context) error {
	s.rd.op.Lock()
	defer s.rd.op.Unlock()
	stop := context.AfterFunc(ctx, s.rd.signal)
	defer stop()
	var w waiter
	defer s.doneWaiting(&w, &s.rd)
	for {
		sent, ev := s.introduce(), RecvReady
		if !sent {
			ev |= SendReady
		}
		got, err := s.negotiated(sent)
		if err != nil || got {
			if err == nil {
				s.idle.join(s)
				s.alive.start(s)
			}
			return err
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if s.rd.state.Load()&stClosed != 0 {
			return ErrClosed
		}
		s.pause(&w, &s.rd, ev)
	}
}

func (s *Session) negotiated(sent bool) (bool, error) {
	s.rx.mu.Lock()
	defer s.rx.mu.Unlock()
	if s.gone {
		return false, ErrClosed
	}
	if !sent && s.ep.Err() == nil { // to a peer that has left it need not be sent; what it sent is still read
		return false, nil
	}
	ev := &s.rx.ev
	if !s.ep.Poll(ev) {
		// The message may have come between the Poll and the end: look once more.
		if err := s.ep.Err(); err == nil {
			return false, nil
		} else if !s.ep.Poll(ev) {
			return false, fmt.Errorf("session: the peer left before negotiation: %w", connErr(err))
		}
	}
	if ev.Kind != Message || len(ev.Msg) < headerLen+paramsLen || msgType(ev.Msg[0]) != msgNegotiate {
		if ev.Kind == Message {
			s.ep.Drop()
		}
		return false, &Unavailable{ReasonProtocol, errors.New("session: the peer's first message is no negotiation")}
	}
	p, err := getParams(ev.Msg[headerLen:])
	s.ep.Drop()
	if err != nil {
		return false, err
	}
	if p.credits == 0 && s.lim.Window != 0 || p.credits != 0 && s.lim.Window == 0 {
		return false, &Unavailable{ReasonProtocol, errors.New("session: one end has flow control of its own and the other has not")}
	}
	s.peer = p
	s.rx.begun = true
	s.tx.maxMsg = int(min(uint32(s.lim.MaxMessage), p.maxMsg))
	s.tx.plan(s)
	s.credits.received.Add(1)
	s.dealtWith()
	s.rx.messages++
	return true, nil
}
