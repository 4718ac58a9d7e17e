// Package connpair moves the ends of a connection as package san does, to a session over any
// endpoint. Only tests and benchmarks import it.
package connpair

import (
	"context"
	"errors"
	"fmt"

	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/session"
)

// Nobody is the Life of a connection that package san does not know.
type Nobody struct{}

func (Nobody) Used(newconn.Handle, bool) {}
func (Nobody) Closed()                   {}
func (Nobody) Holds() bool               { return false }
func (Nobody) Moved(string)              {}
func (Nobody) Left(error)                {}

// Propose proposes to the other end of c to move to a session over an endpoint, which c owns from now
// on; hello names the connection.
func Propose(ctx context.Context, c *sanconn.Conn, ep session.Endpoint, cfg session.Config, hello []byte) error {
	handle := newconn.HandleOf(c)
	notes := handle.Notes()
	var s *session.Session
	cfg.OnNote = func(note []byte) { notes(s, note) } // no note comes before Negotiate
	s = session.New(ep, cfg)
	err := handle.Propose(ctx, s, hello, func(answer []byte) error {
		if len(answer) != 1 || answer[0] != moves {
			return ErrRefused
		}
		return nil
	})
	if err != nil && !errors.Is(err, newconn.ErrNoAnswer) {
		s.Abort()
	}
	return err
}

// ErrRefused means that the acceptor does not move the connection.
var ErrRefused = errors.New("connpair: the acceptor stays on TCP")

// The acceptor's answers.
const (
	stays = 0
	moves = 1
)

// Accept handles a proposal over an endpoint, which it owns from now on, for the connection that find
// returns.
func Accept(ctx context.Context, ep session.Endpoint, cfg session.Config, find func(hello []byte) *sanconn.Conn) error {
	t := &taker{find: find, decided: make(chan error, 1)}
	cfg.Accepting = true
	cfg.OnNote = t.note
	s := session.New(ep, cfg)
	t.session = s
	err := s.Negotiate(ctx)
	if err == nil {
		select {
		case err = <-t.decided:
		case <-ctx.Done():
			err = ctx.Err()
		}
	}
	if err != nil && !errors.Is(err, ErrRefused) {
		s.Abort()
	}
	return err
}

// taker handles a session's notes.
type taker struct {
	find    func([]byte) *sanconn.Conn
	session *session.Session
	notes   func(*session.Session, []byte)
	decided chan error
}

func (t *taker) note(note []byte) {
	switch {
	case t.notes != nil:
		t.notes(t.session, note)
	case t.find == nil: // it was refused
	case len(note) == 0 || note[0] != newconn.NoteProposal:
		t.find = nil
		t.decided <- errors.New("connpair: no proposal")
	default:
		c := t.find(note[1:])
		t.find = nil // find would keep the connection alive
		if c == nil {
			t.decided <- errors.New("connpair: a proposal for no connection")
			return
		}
		h := newconn.HandleOf(c)
		t.notes = h.Notes()
		err := h.Accept(t.session, []byte{moves})
		if err != nil {
			t.notes = nil
			t.session.SendNote([]byte{newconn.NoteAnswer, stays})
			t.session.Close()
			err = fmt.Errorf("%w: %w", ErrRefused, err)
		}
		t.decided <- err
	}
}
