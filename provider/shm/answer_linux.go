package shm

import (
	"context"
	"sync"
	"time"

	"github.com/sanconn/san/internal/spin"
	"github.com/sanconn/san/session"
)

// pollAnswer is how long a dial polls before it sleeps. It is longer than spinFor: the
// acceptor has to be woken, and makes a dozen system calls before it answers.
const pollAnswer = 200 * time.Microsecond

// answers is how dials of a link wait for the peer's answer: one at a time polls.
type answers struct {
	mu      sync.Mutex // guards history; whoever polls has it
	history spin.History
}

// poll polls for a while until there is an answer, and reports whether there is.
func (a *answers) poll(there func() bool) bool {
	if !a.mu.TryLock() {
		return false
	}
	defer a.mu.Unlock()
	var w spin.Wait
	if !w.Begin(&a.history, pollAnswer) {
		return false
	}
	for !there() {
		if !w.Turn() {
			return there()
		}
	}
	w.End()
	return true
}

// answer waits for the answer to a connect: the mark in the slot that it is accepted, or a
// reply.
func (d *dialing) answer(ctx context.Context, reply <-chan uint8) (code uint8, err error) {
	l, e := d.link, d.e
	defer e.connecting.Store(false)
	accepted := func() bool { return e.remote.accepted.Load() != 0 }
	there := l.answers.poll(accepted)
	if !there {
		l.attend.watch()
		defer l.attend.unwatch()
	}
	for ; !there; there = accepted() {
		e.Arm(session.RecvReady) // that wakes for the mark, too
		if accepted() {
			break
		}
		select {
		case code := <-reply:
			return code, nil
		case <-e.answered:
		case <-l.gone:
			return codeOK, errLinkGone
		case <-ctx.Done():
			return codeOK, &session.Unavailable{Reason: session.ReasonTimeout, Err: ctx.Err()}
		}
	}
	e.Disarm(session.RecvReady)
	l.slots.accepted(d.slot)
	return codeOK, nil
}
