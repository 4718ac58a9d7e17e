package sanconn_test

import (
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/internal/connpair"
	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/session"
)

// proposedInVain returns a connection that has proposed a move to a process which takes the proposal and
// never answers, and the other end of TCP.
func proposedInVain(t *testing.T, limits session.Limits) (*sanconn.Conn, *net.TCPConn) {
	t.Helper()
	d, b, err := tcpPair()
	if err != nil {
		t.Fatal(err)
	}
	a := newconn.New(d, newconn.Config{Life: connpair.Nobody{}}).(*sanconn.Conn)
	closeAtEnd(t, a)
	t.Cleanup(func() { b.Close() })
	ea, eb := twin.Pair(twin.Config{Limits: limits})
	came := make(chan struct{})
	s := session.New(eb, session.Config{Accepting: true, OnNote: func(note []byte) {
		if len(note) > 0 && note[0] == newconn.NoteProposal {
			close(came)
		}
	}})
	t.Cleanup(s.Abort)
	go s.Negotiate(t.Context())
	go connpair.Propose(t.Context(), a, ea, session.Config{}, nil)
	<-came
	a.SetDeadline(time.Now().Add(patience))
	b.SetDeadline(time.Now().Add(patience))
	return a, b
}

// If the process that got a proposal is silent, each end of the connection still finds the other's end:
// that process may not be the connection's peer, which knows nothing of the proposal.
func TestEndsBesideAProposalWithoutAnAnswer(t *testing.T) {
	defer sanconn.SetSilentTimeout(10 * time.Millisecond)()
	for _, e := range carriers[2:4] {
		t.Run("of the peer, "+e.name, func(t *testing.T) {
			a, b := proposedInVain(t, e.limits)
			b.Write([]byte("all"))
			b.Close()
			if got, err := io.ReadAll(a); string(got) != "all" || !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("read %q, %v", got, err)
			}
		})
		t.Run("of this one, "+e.name, func(t *testing.T) {
			a, b := proposedInVain(t, e.limits)
			a.Write([]byte("all"))
			if err := a.CloseWrite(); err != nil {
				t.Error(err)
			}
			if got, err := io.ReadAll(b); string(got) != "all" || err != nil {
				t.Errorf("read %q, %v", got, err)
			}
		})
	}
}

// An answer is ignored if the proposal's time ends while the answer is judged.
func TestAnAnswerBehindTheEndOfItsProposal(t *testing.T) {
	defer sanconn.SetSilentTimeout(10 * time.Millisecond)()
	d, b, err := tcpPair()
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	a := newconn.New(d, newconn.Config{Life: movedIsAnError{t: t}}).(*sanconn.Conn)
	closeAtEnd(t, a)
	h := newconn.HandleOf(a)
	ea, eb := twin.Pair(twin.Config{})
	var asked, asks *session.Session
	asked = session.New(eb, session.Config{Accepting: true, OnNote: func([]byte) { asked.SendNote([]byte{newconn.NoteAnswer}) }})
	t.Cleanup(asked.Abort)
	notes := h.Notes()
	asks = session.New(ea, session.Config{OnNote: func(note []byte) { notes(asks, note) }})
	go asked.Negotiate(t.Context())
	judging, judge := make(chan struct{}), make(chan struct{})
	proposed := make(chan error, 1)
	go func() {
		proposed <- h.Propose(t.Context(), asks, nil, func([]byte) error {
			close(judging)
			<-judge
			return nil
		})
	}()
	<-judging
	b.Close()
	a.SetDeadline(time.Now().Add(patience))
	if n, err := a.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("read %d, %v", n, err)
	}
	if err := <-proposed; !errors.Is(err, syscall.ETIMEDOUT) {
		t.Errorf("proposed: %v", err)
	}
	close(judge)
	asks.Abort()
	<-asks.Closed()
	if err := a.CloseWrite(); err != nil { // by TCP, not by the session
		t.Error(err)
	}
}

// movedIsAnError is the Life of a connection that must not move.
type movedIsAnError struct {
	connpair.Nobody
	t *testing.T
}

func (m movedIsAnError) Moved(provider string) { m.t.Errorf("it has moved to %s", provider) }

// Each proposal has its full time, even one that follows another which was refused while an end of the
// stream waited for it.
func TestEachProposalIsBounded(t *testing.T) {
	const silent = 500 * time.Millisecond
	defer sanconn.SetSilentTimeout(silent)()
	d, b, err := tcpPair()
	if err != nil {
		t.Fatal(err)
	}
	a := newconn.New(d, newconn.Config{Life: connpair.Nobody{}}).(*sanconn.Conn)
	closeAtEnd(t, a)
	h := newconn.HandleOf(a)
	propose := func() (answer func(), proposed chan error) {
		ea, eb := twin.Pair(twin.Config{})
		var asked, asks *session.Session
		came := make(chan struct{})
		asked = session.New(eb, session.Config{Accepting: true, OnNote: func(note []byte) {
			if len(note) > 0 && note[0] == newconn.NoteProposal {
				close(came)
			}
		}})
		t.Cleanup(asked.Abort)
		notes := h.Notes()
		asks = session.New(ea, session.Config{OnNote: func(note []byte) { notes(asks, note) }})
		t.Cleanup(asks.Abort)
		go asked.Negotiate(t.Context())
		proposed = make(chan error, 1)
		go func() {
			proposed <- h.Propose(t.Context(), asks, nil, func([]byte) error { return connpair.ErrRefused })
		}()
		<-came
		return func() { asked.SendNote([]byte{newconn.NoteAnswer}) }, proposed
	}
	answer, proposed := propose()
	b.Close()
	a.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
	if _, err := a.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatal(err)
	}
	began := time.Now()
	answer()
	if err := <-proposed; !errors.Is(err, connpair.ErrRefused) {
		t.Fatal(err)
	}
	testenv.Eventually(t, patience, func() error { // so that the first one's time ends much earlier
		if time.Since(began) < silent/2 {
			return errors.New("too early")
		}
		return nil
	})
	again := time.Now()
	_, proposed = propose()
	a.SetReadDeadline(time.Now().Add(10 * silent))
	_, err = a.Read(make([]byte, 1))
	if !errors.Is(err, syscall.ECONNRESET) {
		t.Fatalf("it reads %v", err)
	}
	if took := time.Since(again); took < silent {
		t.Errorf("the second one had %v", took)
	}
	if err := <-proposed; !errors.Is(err, syscall.ETIMEDOUT) {
		t.Error(err)
	}
}
