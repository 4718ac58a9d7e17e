package moving

import (
	"errors"
	"time"

	"github.com/sanconn/san/internal/tcpid"
	"github.com/sanconn/san/session"
)

// DecideTimeout is how long a proposal waits for the listener's condition. Meanwhile the ends of both
// streams wait at the dialer, and so does what needs its descriptor.
const DecideTimeout = 500 * time.Millisecond

// Condition decides whether a connection with these ends may move to a provider, for a process of this
// user; -1: the user is not known.
type Condition func(ends tcpid.Ends, provider string, uid int64) error

// asked is what a condition is called about. A connection has one for each provider and user, and the
// kernel tells only one user.
type asked struct {
	provider string
	uid      int64
}

// errUndecided refuses a connection if the condition ends its goroutine, as testing.T's FailNow does.
var errUndecided = errors.New("the listener's Condition has ended its goroutine")

// condition returns whether the listener's condition has decided in time, and if so its error, which
// refuses the proposal. A later decision is kept for the next proposal. The proposal is known to be
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
		go func() { // ends with the program's condition
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
		decision <- err // another proposal may wait for this decision
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.decisions[by] == decision { // the condition is called again for the next proposal
			delete(l.decisions, by)
		}
		return true, err
	case <-time.After(DecideTimeout):
		return false, nil
	}
}
