package san

import (
	"net"
	"time"

	"github.com/sanconn/san/internal/tcpid"
)

// decideTimeout is how long a dialer's offer waits for the listener's condition. Meanwhile the
// ends of both streams, and its descriptor, wait with it.
const decideTimeout = 500 * time.Millisecond

// MoveOffer is what ListenConfig.Condition decides about: that a connection, which TCP has
// accepted, moves to a SAN.
type MoveOffer struct {
	LocalAddr, RemoteAddr *net.TCPAddr // the connection's, as at this end, without zones
	Provider              string       // "shm", "verbs"

	// UID is the user of the process at the other end, as the kernel tells: of a process of
	// this network namespace, by shm. Otherwise it is -1.
	UID int64
}

// asks returns what asks the program's condition; nil: there is none.
func (lc *ListenConfig) asks() condition {
	decide := lc.Condition
	if decide == nil {
		return nil
	}
	return func(ends tcpid.Ends, provider string, uid int64) error {
		return decide(MoveOffer{
			LocalAddr:  net.TCPAddrFromAddrPort(ends.Local),
			RemoteAddr: net.TCPAddrFromAddrPort(ends.Remote),
			Provider:   provider,
			UID:        uid,
		})
	}
}

// condition decides whether a connection with these ends may move to a provider, for a process of
// a user; -1: who it is, is not known.
type condition func(ends tcpid.Ends, provider string, uid int64) error

// condition returns whether the listener's condition has decided in time, and why it refuses the
// offer, nil: it does not. What it decides later the next offer finds. The offer is known to be
// from the connection's other end.
func (t *taker) condition(l *life) (decided bool, err error) {
	if l.condition == nil {
		return true, nil
	}
	by := asked{t.provider, -1}
	if t.user != nil {
		by.uid = int64(*t.user)
	}
	d := l.decide(by)
	select {
	case <-d.made:
		l.decided(by, d)
		return true, d.err
	case <-time.After(decideTimeout):
		return false, nil
	}
}

// decision is what a condition says of an offer.
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

// decide calls the condition, unless that has been done for an offer that has not had its answer.
func (l *life) decide(by asked) *decision {
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
			if d.err = l.condition(l.ends, by.provider, by.uid); d.err != nil {
				l.failed(&Unavailable{Reason: ReasonRefused, Err: d.err})
			}
		}()
	}
	return d
}

// decided forgets a decision that an offer has as its answer. The condition decides anew about
// the next one.
func (l *life) decided(by asked, d *decision) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.decisions[by] == d {
		delete(l.decisions, by)
	}
}
