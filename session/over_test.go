package session_test

import (
	"errors"
	"testing"

	"github.com/sanconn/san/session"
	"github.com/sanconn/san/session/twin"
)

// abortsInErr is aborted by its own session when that asks, in the middle of an operation, how
// the endpoint is.
type abortsInErr struct {
	*twin.Endpoint
	abort func()
}

func (e *abortsInErr) Err() error {
	if f := e.abort; f != nil {
		e.abort = nil
		go f()
		for e.Endpoint.Err() == nil {
			nap(latency)
		}
	}
	return e.Endpoint.Err()
}

// Write and CloseWrite, when the connection is aborted between their looks at its own
// state and at the endpoint's, say that it was closed, and not what the endpoint calls
// that.
func TestAbortBetweenLooks(t *testing.T) {
	for name, f := range map[string]func(*session.Session) error{
		"Write":      func(s *session.Session) error { _, err := s.Write(make([]byte, 1<<20)); return err },
		"CloseWrite": (*session.Session).CloseWrite,
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				ea, eb := twins(t, ring)
				e := &abortsInErr{Endpoint: ea}
				a, b := session.New(e, session.Config{}), session.New(eb, session.Config{})
				defer idle()
				defer b.Abort()
				defer a.Abort()
				negotiate(t, a)
				negotiate(t, b)
				aborted := false
				e.abort = func() { aborted = true; a.Abort() }
				if err := f(a); !errors.Is(err, session.ErrClosed) {
					t.Errorf("it ends with %v", err)
				}
				a.Abort()
				if <-a.Closed(); !aborted {
					t.Error("nobody asked the endpoint")
				}
			})
		})
	}
}
