// Package connpair makes both ends of a connection as package san does, for tests of one
// process: over a TCP connection by loopback, and moved to a session over any two endpoints.
// Only tests and benchmarks import it.
package connpair

import (
	"context"
	"errors"
	"fmt"
	"net"

	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/session"
)

// TCP returns both ends of a TCP connection: the dialer's first.
func TCP() (dialed, accepted *net.TCPConn, err error) {
	l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		return nil, nil, err
	}
	defer l.Close()
	if dialed, err = net.DialTCP("tcp", nil, l.Addr().(*net.TCPAddr)); err != nil {
		return nil, nil, err
	}
	if accepted, err = l.AcceptTCP(); err != nil {
		dialed.Close()
		return nil, nil, err
	}
	return dialed, accepted, nil
}

// New returns both ends of a connection on TCP: the dialer's first.
func New(dialer, acceptor newconn.Config) (a, b *sanconn.Conn, err error) {
	d, e, err := TCP()
	if err != nil {
		return nil, nil, err
	}
	ca, _ := newconn.New(d, dialer)
	cb, _ := newconn.New(e, acceptor)
	return ca.(*sanconn.Conn), cb.(*sanconn.Conn), nil
}

// Offer offers the other end of c to move to a session over an endpoint, which it owns from
// now on; hello tells which connection. judge, if not nil, has the last word: an error refuses
// the acceptor's answer.
func Offer(ctx context.Context, c *sanconn.Conn, ep session.Endpoint, cfg session.Config, hello []byte, judge func() error) error {
	handle := newconn.HandleOf(c)
	notes := handle.Notes()
	var s *session.Session
	cfg.OnNote = func(note []byte) { notes(s, note) } // there is none before Negotiate
	s = session.New(ep, cfg)
	err := handle.Offer(ctx, s, hello, func(answer []byte) error {
		switch {
		case len(answer) != 1 || answer[0] != moves:
			return ErrRefused
		case judge != nil:
			return judge()
		}
		return nil
	})
	if err != nil && !errors.Is(err, newconn.ErrNoAnswer) {
		s.Abort()
	}
	return err
}

// ErrRefused: the acceptor does not move.
var ErrRefused = errors.New("connpair: the acceptor stays on TCP")

// The acceptor's answers.
const (
	stays = 0
	moves = 1
)

// Take takes an offer by an endpoint, which it owns from now on, for the connection that find
// returns.
func Take(ctx context.Context, ep session.Endpoint, cfg session.Config, find func(hello []byte) *sanconn.Conn) error {
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

// taker takes a session's notes.
type taker struct {
	find    func([]byte) *sanconn.Conn
	session *session.Session
	taken   func(*session.Session, []byte)
	decided chan error
}

func (t *taker) note(note []byte) {
	switch {
	case t.taken != nil:
		t.taken(t.session, note)
	case t.find == nil: // it was refused
	case len(note) == 0 || note[0] != newconn.NoteOffer:
		t.find = nil
		t.decided <- errors.New("connpair: no offer")
	default:
		c := t.find(note[1:])
		t.find = nil // it would keep the connection alive
		if c == nil {
			t.decided <- errors.New("connpair: an offer for no connection")
			return
		}
		h := newconn.HandleOf(c)
		t.taken = h.Notes()
		err := h.Take(t.session, []byte{moves})
		if err != nil {
			t.taken = nil
			t.session.SendNote([]byte{newconn.NoteAnswer, stays})
			t.session.Close()
			err = fmt.Errorf("%w: %w", ErrRefused, err)
		}
		t.decided <- err
	}
}

// Sessions are the configurations of both ends' sessions.
type Sessions struct{ Dialer, Acceptor session.Config }

// Move moves a connection to a session over these endpoints, which it owns from now on. It
// returns as soon as both ends have agreed: each direction moves when its writer and reader
// get there. newconn.Handle.Moved waits for that.
func Move(ctx context.Context, a, b *sanconn.Conn, dialer, acceptor session.Endpoint, cfg Sessions) error {
	taken := make(chan error, 1)
	go func() {
		taken <- Take(ctx, acceptor, cfg.Acceptor, func([]byte) *sanconn.Conn { return b })
	}()
	err := Offer(ctx, a, dialer, cfg.Dialer, nil, nil)
	return errors.Join(err, <-taken)
}

// Moved returns both ends of a connection of which both directions have moved.
func Moved(ctx context.Context, dialer, acceptor session.Endpoint, cfg Sessions, configs ...newconn.Config) (a, b *sanconn.Conn, err error) {
	configs = append(configs, newconn.Config{}, newconn.Config{})
	if a, b, err = New(configs[0], configs[1]); err != nil {
		return nil, nil, err
	}
	err = Move(ctx, a, b, dialer, acceptor, cfg)
	for _, c := range []*sanconn.Conn{a, b} {
		if err == nil {
			err = newconn.HandleOf(c).Moved(ctx)
		}
	}
	if err != nil {
		a.Close()
		b.Close()
		return nil, nil, err
	}
	return a, b, nil
}
