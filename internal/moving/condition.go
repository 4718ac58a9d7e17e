package moving

import (
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
	d := l.decide(by)
	select {
	case <-d.made:
		l.decided(by, d)
		return true, d.err
	case <-time.After(DecideTimeout):
		return false, nil
	}
}

// decision is what a condition says of a proposal.
type decision struct {
	made chan struct{} // closed when err is set
	err  error
}

// asked is for whom a condition is called. A connection has few of them: a provider each, and one
// user, whom the kernel has told.
type asked struct {
	provider string
	uid      int64
}

// decide calls the condition, unless that has been done for a proposal that has not had its answer.
func (l *Life) decide(by asked) *decision {
	l.mu.Lock()
	defer l.mu.Unlock()
	d := l.decisions[by]
	if d == nil {
		if l.decisions == nil {
			l.decisions = make(map[asked]*decision)
		}
		d = &decision{made: make(chan struct{})}
		l.decisions[by] = d
		go func() { // as long as the program's condition takes
			defer close(d.made)
			if d.err = l.Condition(l.ends, by.provider, by.uid); d.err != nil {
				l.Failed(&session.Unavailable{Reason: session.ReasonRefused, Err: d.err})
			}
		}()
	}
	return d
}

// decided forgets a decision that a proposal has as its answer. The condition decides anew about
// the next one.
func (l *Life) decided(by asked, d *decision) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.decisions[by] == d {
		delete(l.decisions, by)
	}
}
