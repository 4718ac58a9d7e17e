package session_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/session"
)

// callsAt is an endpoint that calls act just before the session's at-th call of it, counted from the
// time that on is set.
type callsAt struct {
	*twin.Endpoint
	on    atomic.Bool
	calls atomic.Int32
	at    int32
	act   func()
}

func (e *callsAt) called() {
	if e.on.Load() && e.calls.Add(1) == e.at {
		e.act()
	}
}

func (e *callsAt) Err() error {
	e.called()
	return e.Endpoint.Err()
}

func (e *callsAt) Poll(ev *session.Event) bool {
	e.called()
	return e.Endpoint.Poll(ev)
}

func (e *callsAt) Reserve(lo, hi int) []byte {
	e.called()
	return e.Endpoint.Reserve(lo, hi)
}

func (e *callsAt) ReserveControl(n int) []byte {
	e.called()
	return e.Endpoint.ReserveControl(n)
}

func (e *callsAt) CommitControl(n int) {
	e.called()
	e.Endpoint.CommitControl(n)
}

func (e *callsAt) Close() error {
	e.called()
	return e.Endpoint.Close()
}

func (e *callsAt) Abort() {
	e.called()
	e.Endpoint.Abort()
}

func (e *callsAt) Retire() {
	e.called()
	e.Endpoint.Retire()
}

// besideClose returns calls of the methods that may run beside Close. With failing, they include those
// that end the session with an error, after which other methods do not use the endpoint.
func besideClose(s *session.Session, negotiated, failing bool) []func() {
	calls := []func(){
		func() {
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			s.Negotiate(ctx)
		},
		func() { s.CloseWrite() },
		func() { s.Over() },
		func() { s.Withdraw() },
		func() { s.SetKeepAlive(session.KeepAlive{}) },
		func() { s.Debug() },
		func() { s.Stats() },
		func() { s.Delivered() },
		func() { s.ResetAtDeath(true) },
		func() { s.Wake(session.RecvReady | session.SendReady) },
		func() { s.SendNote([]byte("note")) },
		func() { s.Spare() },
		func() { s.MostLeft() },
		func() { s.ReadPosition(); s.WritePosition() },
		func() { s.InterruptRead(true); s.InterruptRead(false) },
		func() { s.InterruptWrite(true); s.InterruptWrite(false) },
	}
	if failing {
		calls = append(calls, func() { s.Close() }, s.Abort, func() { s.Fail(errors.New("a fault of the test's")) })
	}
	if !negotiated {
		return calls
	}
	return append(calls,
		func() { s.Read(make([]byte, 2)) },
		func() { s.Write(make([]byte, 20)) },
		func() { s.Write(make([]byte, 1<<20)) },
		func() { s.WriteBuffers([][]byte{make([]byte, 20), make([]byte, 1<<20)}) },
		func() { s.WriteUrgent([]byte("u")) },
		func() { s.ReadUrgent(make([]byte, 1)) },
		func() {
			if b, err := s.Peek(); err == nil {
				s.Discard(len(b))
			}
		},
		func() {
			if b, err := s.Reserve(10); err == nil {
				s.Commit(len(b))
			}
		},
		s.InWrite,
		func() {
			s.TakeRead()
			s.ReadTaken(make([]byte, 10), func() bool { return true })
			s.AwaitTaken(func() bool { return true })
			s.GiveBackRead(false)
		},
		func() {
			s.TakeWrite()
			s.WriteTaken(make([]byte, 10))
			s.GiveBackWrite()
		},
	)
}

// All methods are called while a session ends, and after it has. None of them may use the endpoint
// against its contract, which the twin reports, or wait for ever.
func TestMethodsBesideClose(t *testing.T) {
	const (
		mostCalls = 40  // that the end of a session makes to its endpoint
		turns     = 300 // so that the other goroutines reach their own calls
	)
	for how, end := range map[string]func(*session.Session) error{
		"Close":       (*session.Session).Close,
		"CloseUnread": (*session.Session).CloseUnread,
		"Abort":       func(s *session.Session) error { s.Abort(); return nil },
	} {
		for _, negotiates := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s,negotiated=%v", how, negotiates), func(t *testing.T) {
				each(t, func(t *testing.T, cfg twin.Config) {
					for at := int32(1); at <= mostCalls; at++ {
						ea, eb := twins(t, cfg)
						e := &callsAt{Endpoint: ea, at: at}
						scfg := withoutKeepAlive(session.Config{OnNote: func([]byte) {}})
						a, b := session.New(e, scfg), session.New(eb, scfg)
						if negotiates {
							negotiate(t, a)
							negotiate(t, b)
							a.Write([]byte("unread"))
							b.Write([]byte("unread"))
						}
						pass(time.Second)
						calls := besideClose(a, negotiates, at%2 == 0)
						var under atomic.Int32
						e.act = func() {
							for _, f := range calls {
								under.Add(1)
								go func() {
									defer under.Add(-1)
									f()
								}()
							}
							for range turns { // it does not wait for them: the session may hold a lock
								runtime.Gosched()
							}
						}
						e.on.Store(true)
						if err := end(a); err != nil {
							t.Errorf("call %d: %v", at, err)
						}
						pass(time.Minute)
						for _, f := range calls {
							f()
						}
						a.Abort()
						b.Abort()
						<-a.Closed()
						<-b.Closed()
						pass(time.Minute)
						if at == 1 && e.calls.Load() == 0 {
							t.Error("the end calls no method of the endpoint")
						}
						if n := under.Load(); n != 0 {
							t.Errorf("call %d: %d methods have not returned", at, n)
						}
						if !ea.Retired() || ea.Left().Allocated != 0 {
							t.Errorf("call %d: left behind: %+v", at, ea.Left())
						}
					}
				})
			})
		}
	}
}
