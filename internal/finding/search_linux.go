package finding

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/hello"
	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/reason"
	"github.com/sanconn/san/internal/tcpid"
	"github.com/sanconn/san/provider/shm"
	"github.com/sanconn/san/session"
)

const (
	// GapMost is how many names in a row may be free before a search asks only those that were
	// there before: one that is free takes some 20 µs. Each process takes the first that is free,
	// so there are gaps only where others have ended. Once in gapFor it looks behind them.
	GapMost = 4
	gapFor  = time.Second

	// AnswersIn is how long a process must have had for its answer to count as silent. One takes
	// much less, and most dials have more: who does nothing costs one of these, not each.
	AnswersIn = 20 * time.Millisecond

	// nobodyFor is how long a port of which nobody had a name is not asked for again: its
	// listener, most likely, does without this library. This process may have one there since.
	nobodyFor = time.Second
)

// Search looks for the process that has a connection's other end.
type Search struct {
	At   Place
	To   netip.AddrPort // the other end
	User uint32         // whose process it has to be, in this network namespace

	// Propose proposes the move to the process at an endpoint, which it owns from then on.
	Propose func(context.Context, session.Endpoint) error
}

// Run asks one process after the other, until one has the connection's other end, and moves it or
// does not.
func (q Search) Run(ctx context.Context) error {
	var why error
	found, done := false, false
	hint := HintOf(q.At)
	asked := Numbers(0)
	ask := func(n int) (there bool) {
		var err error
		end, ends := ctx.Deadline()
		hurried := ends && time.Until(end) < AnswersIn
		done, err = q.ask(ctx, n)
		there = errors.Is(err, hello.ErrUnknown) || !reason.Is(err, session.ReasonNoListener)
		found = found || there
		asked.Set(n, true)
		silent := errors.Is(err, newconn.ErrNotTaken) || reason.Is(err, session.ReasonTimeout) && !errors.Is(err, hello.ErrUndecided)
		canceled := errors.Is(ctx.Err(), context.Canceled) // the attempt, which says nothing of the process
		if !canceled && !(silent && hurried) {
			Note(q.At, func(h *Hint) {
				h.Seen.Set(n, there)
				h.Silent.Set(n, there && silent)
			})
		}
		switch { // who has it not may accept it yet
		case !there && ctx.Err() != nil: // others were not asked
			why = ctx.Err()
		case done, reason.Is(err, session.ReasonStays), there && !errors.Is(why, hello.ErrUnknown) && !reason.Is(why, session.ReasonStays):
			why = err
		}
		return there
	}
	if hint.known && !hint.Silent.has(hint.last) {
		ask(hint.last)
	}
	if !found && !done && time.Since(HintOf(q.to()).free) < nobodyFor && !own.has(q.At) {
		return q.nobody()
	}
	behind := time.Since(hint.searched) >= gapFor
	for n, gap := 0, 0; !done && n < shm.Numbers; n++ {
		switch {
		case asked.has(n), hint.Silent.has(n):
			gap = 0
		case gap >= GapMost && !behind && !hint.Seen.has(n):
		case ask(n):
			gap = 0
		default:
			gap++
		}
	}
	// Those that may have been stopped come last, in any order: there may be time for some alone.
	for _, n := range rand.Perm(shm.Numbers) {
		if !done && hint.Silent.has(n) && !asked.has(n) {
			ask(n)
		}
	}
	if !found && !done {
		Note(q.At, func(h *Hint) { *h = Hint{} })
		Note(q.to(), func(h *Hint) { h.free = time.Now() })
		return q.nobody()
	}
	if behind && !done { // what was found at once has looked at few
		Note(q.At, func(h *Hint) { h.searched = time.Now() })
	}
	return why
}

// to is what is remembered if no process is found: others of the port may serve another address.
func (q Search) to() Place { return Place{q.At.Dir, q.At.Namespace, q.To} }

func (q Search) nobody() error {
	if q.At.Dir != "" {
		return &session.Unavailable{Reason: session.ReasonNotServed,
			Err: fmt.Errorf("shm: %w, and no process in %s accepts for port %d", tcpid.ErrNotHere, q.At.Dir, q.At.Peer.Port())}
	}
	return &session.Unavailable{Reason: session.ReasonNoListener, Err: fmt.Errorf("shm: no process accepts for port %d", q.At.Peer.Port())}
}

// linkTries is how often a process is asked whose link ends before it has taken the connection:
// by a link that was there, as of a process that has ended since, and by one that is made afresh.
const linkTries = 2

// ask proposes the move to one process. done: no other one is worth asking.
func (q Search) ask(ctx context.Context, number int) (done bool, err error) {
	for range linkTries {
		done, err = q.askOnce(ctx, number)
		if done || !errors.Is(err, shm.ErrLinkGone) || ctx.Err() != nil {
			break
		}
	}
	return done, err
}

func (q Search) askOnce(ctx context.Context, number int) (done bool, err error) {
	ep, err := shm.Dial(ctx, q.At.Peer.Port(), number, q.User, shm.Config{Dir: q.At.Dir})
	if err != nil {
		return ctx.Err() != nil || errors.Is(err, shm.ErrDirectory), err
	}
	err = q.Propose(ctx, ep)
	switch {
	case err == nil, errors.Is(err, newconn.ErrNoAnswer):
		q.noteFound(number)
		return true, err
	case errors.Is(err, hello.ErrGuessed):
		return true, err
	case errors.Is(err, hello.ErrOther), errors.Is(err, hello.ErrImpostor),
		errors.Is(err, newconn.ErrNotTaken), reason.Is(err, session.ReasonNoListener, session.ReasonResources), // it has not taken it
		errors.Is(err, unix.ECONNRESET), errors.Is(err, unix.EPIPE), // it has ended; if it had the other end, so does TCP
		errors.Is(err, hello.ErrStays): // it, not this end, which may have passed the connection on to another one
		return false, err
	case reason.Is(err, session.ReasonRefused), errors.Is(err, hello.ErrUndecided):
		q.noteFound(number)
	}
	return true, err
}

// noteFound remembers who has the other end.
func (q Search) noteFound(number int) {
	Note(q.At, func(h *Hint) { h.last, h.known = number, true })
	if to := q.to(); !HintOf(to).free.IsZero() {
		Note(to, func(h *Hint) { h.free = time.Time{} })
	}
}
