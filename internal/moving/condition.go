package moving

import (
	"errors"
	"time"

	"github.com/sanconn/san/internal/tcpid"
	"github.com/sanconn/san/session"
)

// DecideTimeout is how long a dialer's proposal waits for the listener's condition. Meanwhile the
// ends of both streams, and its descriptor, wait with it.
const DecideTimeout = 500 * time.Millisecond

// Condition decides whether a connection with these ends may move to a provider, for a process of
// a user; -1: who it is, is not known.
type Condition func(ends tcpid.Ends, provider string, uid int64) error

// asked is for whom a condition is called. A connection has few of them: a provider each, and one
// user, whom the kernel has told.
type asked struct {
	provider string
	uid      int64
}

// errUndecided refuses where the condition ends its goroutine, as testing.T's FailNow does.
var errUndecided = errors.New("the listener's Condition has ended its goroutine")

// condition returns whether the listener's condition has decided in time, and why it refuses the
// proposal, nil: it does not. What it decides later the next proposal finds. The proposal is known to be
// from the connection's other end.
func (t *taker) condition(l *Life) (decided bool, err error) {
	if l.Condition == nil {
		return true, nil
	}
	by := asked{t.Provider, -1}
	if t.User != nil {
		by.uid = int64(*t.User)
	}
	l.mu.Lock()
	decision := l.decisions[by]
	if decision == nil {
		if l.decisions == nil {
			l.decisions = make(map[asked]chan error)
		}
		decision = make(chan error, 1)
		l.decisions[by] = decision
		go func() { // as long as the program's condition takes
			err := errUndecided
			defer func() {
				if err != nil {
					l.Failed(&session.Unavailable{Reason: session.ReasonRefused, Err: err})
				}
				decision <- err
			}()
			err = l.Condition(l.ends, by.provider, by.uid)
		}()
	}
	l.mu.Unlock()
	select {
	case err = <-decision:
		decision <- err // others may wait for the same
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.decisions[by] == decision { // the condition decides anew about the next one
			delete(l.decisions, by)
		}
		return true, err
	case <-time.After(DecideTimeout):
		return false, nil
	}
}
