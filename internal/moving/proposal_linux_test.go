package moving

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sanconn/san/internal/hello"
	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/tcpid"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/session"
)

// A proposal that is being accepted when its time ends, as in a process that was stopped meanwhile, is
// not withdrawn: the connection would be lost.
func TestTimeEndsWhileAProposalIsTaken(t *testing.T) {
	tcp, stamp, accepted, l := stampedPair(t)
	ends, err := tcpid.EndsOf(tcp)
	if err != nil {
		t.Fatal(err)
	}
	conn := newconn.New(tcp, newconn.Config{Life: &Life{dialed: true}})
	dialed := newconn.HandleOf(conn)
	t.Cleanup(func() { conn.Close() })
	ours, theirs := twin.Pair(twin.Config{})
	r := &taker{over: make(chan struct{})}
	r.session = session.New(theirs, session.Config{Accepting: true, OnNote: r.note})
	over, cancel := context.WithCancel(t.Context())
	cancel()
	l.Condition = func(tcpid.Ends, string, int64) error {
		r.run(over)
		return nil
	}
	go r.session.Negotiate(t.Context())
	if err := proposeStamped(t.Context(), ours, Settings{}, dialed, ends, stamp); err != nil {
		t.Fatal(err)
	}
	for _, h := range []newconn.Handle{dialed, accepted} {
		if err := h.Moved(t.Context()); err != nil {
			t.Error(err)
		}
	}
}

// Only the connection's other end can answer that the connection moves, that it is refused for good, or
// that the listener's condition has not decided yet. After such an answer from anyone else, the endpoint
// is given back.
func TestWhoseAnswerIsBelieved(t *testing.T) {
	tcp, stamp, _, _ := stampedPair(t)
	for _, a := range []hello.Answer{{Code: hello.Moves}, {Code: hello.Refused}, {Code: hello.Unknown, Undecided: true}} {
		conn := newconn.New(tcp, newconn.Config{Life: &Life{dialed: true}})
		ours, theirs := twin.Pair(twin.Config{})
		ep := &retiring{Endpoint: ours}
		var s *session.Session
		a.Stamp = uint16(stamp>>16) + 1
		s = session.New(theirs, session.Config{Accepting: true, OnNote: func(note []byte) {
			if note != nil {
				s.SendNote(append([]byte{newconn.NoteAnswer}, a.Encode()...))
			}
		}})
		go s.Negotiate(t.Context())
		err := proposeStamped(t.Context(), ep, Settings{}, newconn.HandleOf(conn), tcpid.Ends{}, stamp)
		if !errors.Is(err, hello.ErrImpostor) {
			t.Errorf("%+v: %v", a, err)
		}
		testenv.Eventually(t, 10*time.Second, func() error {
			if !ep.retired.Load() {
				return errors.New("the endpoint is not given back")
			}
			return nil
		})
		s.Abort()
	}
}

// A session with a proposal for none of this process's connections ends after the answer.
func TestASessionForNoConnection(t *testing.T) {
	ours, theirs := twin.Pair(twin.Config{})
	ep := &retiring{Endpoint: theirs}
	r := &taker{over: make(chan struct{})}
	r.session = session.New(ep, session.Config{Accepting: true, OnNote: r.note})
	go r.session.Negotiate(t.Context())
	answers := make(chan []byte, 2)
	s := session.New(ours, session.Config{OnNote: func(note []byte) { answers <- note }})
	if err := s.Negotiate(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.SendNote(append([]byte{newconn.NoteProposal}, hello.Proposal{}.Encode()...))
	if note := <-answers; len(note) == 0 || note[0] != newconn.NoteAnswer || hello.Code(note[1]) != hello.Unknown {
		t.Errorf("the answer is %v", note)
	}
	testenv.Eventually(t, 10*time.Second, func() error {
		if !ep.retired.Load() {
			return errors.New("its endpoint is not given back")
		}
		return nil
	})
	s.Abort()
}

// retiring records that an endpoint was retired.
type retiring struct {
	session.Endpoint
	retired atomic.Bool
}

func (r *retiring) Retire() {
	r.retired.Store(true)
	r.Endpoint.Retire()
}

// If there were too many wrong answers before a proposal is made, it is not made and its endpoint is
// given back: those who have sent the answers must not keep its link or its memory occupied.
func TestEndpointBehindTooManyWrongAnswers(t *testing.T) {
	tcp, stamp, _, _ := stampedPair(t)
	l := &Life{dialed: true}
	conn := newconn.New(tcp, newconn.Config{Life: l})
	t.Cleanup(func() { conn.Close() })
	for range tcpid.MostGuesses {
		l.proof.Confirm(stamp, uint16(stamp>>16)+1)
	}
	ours, _ := twin.Pair(twin.Config{})
	ep := &retiring{Endpoint: ours}
	if err := proposeStamped(t.Context(), ep, Settings{}, newconn.HandleOf(conn), tcpid.Ends{}, stamp); err != errTooManyGuesses {
		t.Error(err)
	}
	if !ep.retired.Load() {
		t.Error("it is not")
	}
}
