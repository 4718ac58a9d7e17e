package moving

import (
	"context"
	"errors"
	"net"
	"time"

	"github.com/sanconn/san/internal/hello"
	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/tcpid"
	"github.com/sanconn/san/session"
)

// Propose proposes, at an endpoint, to move a connection to the process there. confirm returns why an
// answer is not from the connection's other end, or nil.
func Propose(ctx context.Context, ep session.Endpoint, cfg session.Config, h newconn.Handle, proposal hello.Proposal, confirm func(hello.Answer) error) error {
	var s *session.Session
	notes := h.Notes()
	cfg.OnNote = func(note []byte) { notes(s, note) } // no note comes before Negotiate
	s = session.New(ep, cfg)
	if lifeOf(h).proof.Guessed() {
		s.Abort()
		return errTooManyGuesses
	}
	err := h.Propose(ctx, s, proposal.Encode(), func(b []byte) error {
		a, err := hello.ParseAnswer(b)
		if err != nil {
			return err
		}
		if a.Code == hello.Moves || a.Code == hello.Refused || a.Undecided { // an answer that only the other end may give
			if err := confirm(a); err != nil {
				return err
			}
		}
		return a.Err()
	})
	if err != nil && !errors.Is(err, newconn.ErrNoAnswer) {
		s.Abort()
	}
	return err
}

// prove tries a move with each stamp that a dialed connection may have, until the peer accepts this end
// as the connection's other end.
func (l *Life) prove(tcp *net.TCPConn, move func(tcpid.Stamp) error) error {
	stamps, err := l.proof.Dialed(tcp, time.Time{})
	if err != nil {
		return &session.Unavailable{Reason: session.ReasonNotServed, Err: err}
	}
	return tryEach(stamps, move)
}

func tryEach(stamps []tcpid.Stamp, move func(tcpid.Stamp) error) (err error) {
	for _, stamp := range stamps {
		if err = move(stamp); !errors.Is(err, hello.ErrOther) {
			break
		}
	}
	return err
}

// proposeStamped is Propose with the connection's stamp as the proof of both ends.
func proposeStamped(ctx context.Context, ep session.Endpoint, s Settings, h newconn.Handle, ends tcpid.Ends, stamp tcpid.Stamp) error {
	proposed := hello.Proposal{Ends: ends, Stamped: true, Challenge: stamp.Challenge()}
	return Propose(ctx, ep, s.Session, h, proposed, func(a hello.Answer) error { return lifeOf(h).confirm(stamp, a) })
}

// confirm returns why an answer to the connection's challenge is not from its other end, or nil.
func (l *Life) confirm(stamp tcpid.Stamp, a hello.Answer) error {
	if l.proof.Confirm(stamp, a.Stamp) {
		return nil
	}
	return &session.Unavailable{Reason: session.ReasonOwner, Err: hello.ErrImpostor}
}

var errTooManyGuesses = &session.Unavailable{Reason: session.ReasonOwner, Err: hello.ErrGuessed}
