package session

import (
	"context"
	"errors"
	"fmt"

	"github.com/sanconn/san/session/internal/credit"
	"github.com/sanconn/san/session/internal/wire"
)

// Version is the version of the protocol in all its layers: messages, notes, and what providers share
// or exchange before. It changes when an older end would misunderstand a newer one, or when an end may
// go beyond a bound that the other end relies on. Providers compare it before there is a session.
const Version = wire.Version

// sendNegotiate sends the negotiation message unless it was sent already. It returns false if there is
// no room for it.
func (s *Session) sendNegotiate() (sent bool) {
	s.txMu.Lock()
	defer s.txMu.Unlock()
	if s.tx.closed || s.tx.stats.messages != 0 {
		return true
	}
	room := s.ep.ReserveControl(wire.NegotiateLen)
	if room == nil {
		return false
	}
	wire.Params{
		Version:    wire.Version,
		Credits:    s.credits.Window(),
		MaxMessage: uint32(s.lim.MaxMessage),
		Caps:       s.bounds.caps,
	}.Put(room)
	s.ep.CommitControl(wire.NegotiateLen)
	s.credits.Sent()
	s.tx.stats.messages++
	return true
}

// Negotiate waits until the peer's negotiation message has come and was understood (N4), or ctx is
// done. After an error the session can only be aborted. An *Unavailable error with ReasonVersion or
// ReasonProtocol means that the peer has another version of the protocol, or another protocol. After a
// success, further calls succeed at once.
func (s *Session) Negotiate(ctx context.Context) (err error) {
	s.rd.begin()
	defer s.rd.op.Unlock()
	switch {
	case s.notes.begun.Load():
		return nil
	case s.rd.state.Load()&stClosed != 0: // the endpoint may be retired: Close waits only for operations that have begun before
		return ErrClosed
	}
	defer context.AfterFunc(ctx, s.rd.signal)()
	s.rd.slept.Store(true) // then it does not poll: a move is in the background, and many moves wait for processors
	s.attempt(&s.rd, func(bool) (want Events) {
		if p := s.failure.Load(); p != nil { // this end has failed it, and takes nothing more from the endpoint
			err = fmt.Errorf("%w: %w", *p, ErrLost)
			return 0
		}
		if want, err = s.negotiateStep(); want != 0 {
			if err = ctx.Err(); err == nil && s.rd.state.Load()&stClosed != 0 { // after a look: Close tells the peer what is unread
				err = ErrClosed
			}
		}
		if err != nil {
			return 0
		}
		return want
	})
	if err == nil {
		s.notes.begun.Store(true)
		s.keep()
		s.alive.start(s)
	}
	return err
}

// negotiateStep does what can be done of the negotiation, and returns what the rest waits for; 0: it is
// over. The caller has rd's op.
func (s *Session) negotiateStep() (want Events, err error) {
	// If the peer has gone, nothing need be sent; what it has sent is still read.
	sent := func() bool { return s.sendNegotiate() || s.ep.Err() != nil }
	if !s.cfg.Accepting && !sent() {
		return SendReady | RecvReady, nil
	}
	if !s.negotiatedByPeer {
		if s.negotiatedByPeer, err = s.negotiated(); err != nil {
			return 0, err
		}
		if !s.negotiatedByPeer {
			return RecvReady, nil
		}
	}
	if !sent() {
		return SendReady, nil
	}
	// Not before: what follows the peer's message may be answered at once, by a goroutine that the
	// endpoint wakes, and the answer would overtake this end's negotiation message.
	s.rxMu.Lock()
	s.rx.stage.reach(running)
	s.rxMu.Unlock()
	s.sendPending() // for what waits for it see ResetAtDeath
	return 0, nil
}

// negotiated handles the peer's negotiation message, if it has come.
func (s *Session) negotiated() (bool, error) {
	s.rxMu.Lock()
	defer s.rxMu.Unlock()
	if s.rx.stage == closed { // the next look finds why
		return false, nil
	}
	ev := &s.rx.ev
	if !s.ep.Poll(ev) {
		// The message may have come after the Poll and before the end: look again.
		if err := s.ep.Err(); err == nil {
			return false, nil
		} else if !s.ep.Poll(ev) {
			return false, fmt.Errorf("session: the peer left before negotiation: %w", connErr(err))
		}
	}
	if ev.Kind != Message {
		return false, &Unavailable{ReasonProtocol, errors.New("session: a completion before negotiation")}
	}
	p, err := s.parseParams(ev.Msg)
	s.rx.drop()
	if err != nil {
		return false, err
	}
	s.credits.ReceivedFirst()
	s.rx.stats.messages++
	s.txMu.Lock()
	s.credits.Limit(p.Credits)
	s.terms = newTerms(&s.cfg, &s.lim, p)
	s.unlockTx()
	return true, nil
}

func (s *Session) parseParams(m []byte) (wire.Params, error) {
	reason := ReasonProtocol
	p, err := wire.ParseParams(m)
	switch {
	case errors.Is(err, wire.ErrVersion):
		reason = ReasonVersion
	case err != nil:
	case p.MaxMessage < MaxControl || p.Credits != 0 && p.Credits < MinWindow-credit.Reserved || p.Credits > credit.Max:
		err = fmt.Errorf("the peer's credits %d or message size %d is out of range", p.Credits, p.MaxMessage)
	case (p.Credits == 0) != s.ring:
		err = errors.New("one end has flow control of its own and the other has not")
	}
	if err != nil {
		err = &Unavailable{reason, fmt.Errorf("session: %w", err)}
	}
	return p, err
}
