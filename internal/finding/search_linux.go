package finding

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
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
	// AnswersIn is how long a process must have had for its answer to count as silent. One takes
	// much less, and most dials have more: who does nothing costs one of these, not each.
	AnswersIn = 20 * time.Millisecond

	// nobodyFor is how long a port of which nobody had a name is not asked for again: its
	// listener, most likely, does without this library. This process may have one there since.
	nobodyFor = time.Second

	// listings is how often the names are listed before a search has found nobody. The kernel goes on
	// where it was by counting: if sockets end meanwhile, it leaves out one that has not. Where one does
	// not know the connection yet, there is another search anyway.
	listings = 2
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
	var why, version error
	found, done := false, false
	hint := HintOf(q.At)
	var asked []string
	ask := func(name string) {
		asked = append(asked, name)
		var err error
		end, ends := ctx.Deadline()
		hurried := ends && time.Until(end) < AnswersIn
		done, err = q.ask(ctx, name)
		there := errors.Is(err, hello.ErrUnknown) || !reason.Is(err, session.ReasonNoListener)
		found = found || there
		silent := errors.Is(err, newconn.ErrNotTaken) || reason.Is(err, session.ReasonTimeout) && !errors.Is(err, hello.ErrUndecided)
		canceled := errors.Is(ctx.Err(), context.Canceled) // the attempt, which says nothing of the process
		if !canceled && !(silent && hurried) {
			Note(q.At, func(h *Hint) { h.setSilent(name, there && silent) })
		}
		if reason.Is(err, session.ReasonVersion) {
			version = err
		}
		switch { // who has it not may accept it yet
		case !there && ctx.Err() != nil: // others were not asked
			why = ctx.Err()
		case done, reason.Is(err, session.ReasonStays), there && !errors.Is(why, hello.ErrUnknown) && !reason.Is(why, session.ReasonStays):
			why = err
		}
	}
	if hint.last != "" && hint.user == q.User && !slices.Contains(hint.Silent, hint.last) {
		ask(hint.last)
	}
	if !found && !done && time.Since(HintOf(q.to()).nobodyAt) < nobodyFor && !own.has(q.At) {
		return q.nobody()
	}
	if done {
		return why
	}
	for listed := range 1 + listings {
		// Those that there are links with first: they may be all, and to list the host's sockets may take
		// longer than to ask.
		names := shm.Linked(q.At.Peer.Port(), q.User, shm.Config{Dir: q.At.Dir})
		if listed > 0 {
			var err error
			names, err = shm.Names(ctx, q.At.Peer.Port(), q.User, shm.Config{Dir: q.At.Dir})
			if err != nil && !found {
				return err
			}
		}
		names = slices.DeleteFunc(names, func(name string) bool { return slices.Contains(asked, name) })
		rand.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
		names = names[:min(len(names), shm.MostNames-len(asked))]
		// Those that may have been stopped come last: there may be time for some alone.
		for _, silent := range []bool{false, true} {
			for _, name := range names {
				if !done && slices.Contains(hint.Silent, name) == silent && !(silent && listed == 0) {
					ask(name)
				}
			}
		}
		if done || listed > 0 && errors.Is(why, hello.ErrUnknown) {
			break
		}
	}
	if !found && !done {
		Note(q.At, func(h *Hint) { *h = Hint{} })
		Note(q.to(), func(h *Hint) { h.nobodyAt = time.Now() })
		return q.nobody()
	}
	if version != nil && errors.Is(why, hello.ErrUnknown) { // most likely it is the one that has it
		why = &session.Unavailable{Reason: session.ReasonVersion, Err: fmt.Errorf("%w; %w", version, why)}
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
	return &session.Unavailable{Reason: session.ReasonNoListener, Err: fmt.Errorf("shm: no process of user %d accepts for port %d", q.User, q.At.Peer.Port())}
}

// linkTries is how often a process is asked whose link ends before it has taken the connection:
// by a link that was there, as of a process that has ended since, and by one that is made afresh.
const linkTries = 2

// ask proposes the move to one process. done: no other one is worth asking.
func (q Search) ask(ctx context.Context, name string) (done bool, err error) {
	for range linkTries {
		done, err = q.askOnce(ctx, name)
		if done || !errors.Is(err, shm.ErrLinkGone) || ctx.Err() != nil {
			break
		}
	}
	return done, err
}

func (q Search) askOnce(ctx context.Context, name string) (done bool, err error) {
	ep, err := shm.Dial(ctx, q.At.Peer.Port(), name, q.User, shm.Config{Dir: q.At.Dir})
	if err != nil {
		return ctx.Err() != nil || errors.Is(err, shm.ErrDirectory), err
	}
	err = q.Propose(ctx, ep)
	switch {
	case err == nil, errors.Is(err, newconn.ErrNoAnswer):
		q.noteFound(name)
		return true, err
	case errors.Is(err, hello.ErrGuessed):
		return true, err
	case errors.Is(err, hello.ErrOther), errors.Is(err, hello.ErrImpostor),
		errors.Is(err, newconn.ErrNotTaken), reason.Is(err, session.ReasonNoListener, session.ReasonResources), // it has not taken it
		reason.Is(err, session.ReasonVersion, session.ReasonProtocol), // nor has one that is not understood, as while a program is replaced
		errors.Is(err, unix.ECONNRESET), errors.Is(err, unix.EPIPE),   // it has ended; if it had the other end, so does TCP
		errors.Is(err, hello.ErrStays): // it, not this end, which may have passed the connection on to another one
		return false, err
	case reason.Is(err, session.ReasonRefused), errors.Is(err, hello.ErrUndecided):
		q.noteFound(name)
	}
	return true, err
}

// noteFound remembers who has the other end.
func (q Search) noteFound(name string) {
	Note(q.At, func(h *Hint) { h.last, h.user = name, q.User })
	if to := q.to(); !HintOf(to).nobodyAt.IsZero() {
		Note(to, func(h *Hint) { h.nobodyAt = time.Time{} })
	}
}
