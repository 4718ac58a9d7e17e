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
	// AnswersIn is the least time that a process must have had before a missing answer counts as
	// silence. An answer takes much less. Most dials have more time than this, so a process that does
	// nothing costs one such dial, not each.
	AnswersIn = 20 * time.Millisecond

	// nobodyFor is how long a port is not searched again after nobody had a name for it: most likely
	// its listener does not use this library. If this process itself has a name there by then, it is
	// searched.
	nobodyFor = time.Second

	// listings is how often the names are listed before a search has found nobody. The kernel finds its
	// place in its list by counting, so if sockets close during the listing it may leave out one that
	// is open. One listing is enough once a process has said that it does not have the connection yet:
	// then another search follows.
	listings = 2
)

// Search looks for the process that has a connection's other end.
type Search struct {
	At   Place
	To   netip.AddrPort // the other end
	User uint32         // the user that its process must have, in this network namespace

	// Propose proposes the move to the process at an endpoint, and owns the endpoint.
	Propose func(context.Context, session.Endpoint) error
}

// Run proposes the move to one process after the other, until it has found the one that has the
// connection's other end. Its error is why the connection does not move.
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
		canceled := errors.Is(ctx.Err(), context.Canceled) // then the attempt was canceled, and its error tells nothing about the process
		if !canceled && !(silent && hurried) {
			Note(q.At, func(h *Hint) { h.setSilent(name, there && silent) })
		}
		if reason.Is(err, session.ReasonVersion) {
			version = err
		}
		switch { // a process that does not have the connection may still accept it: its answer outlasts other errors
		case !there && ctx.Err() != nil: // other processes were not tried
			why = ctx.Err()
		case done, reason.Is(err, session.ReasonStays), there && !errors.Is(why, hello.ErrUnknown) && !reason.Is(why, session.ReasonStays):
			why = err
		}
	}
	if hint.last != "" && hint.user == q.User && !slices.Contains(hint.Silent, hint.last) {
		ask(hint.last)
	}
	if !found && !done && time.Since(HintOf(q.to()).nobodyAt) < nobodyFor && !own.has(q.own()) {
		return q.nobody()
	}
	if done {
		return why
	}
	for listed := range 1 + listings {
		// First the processes that this one has links with: the other end is often there, and listing
		// the host's sockets may take longer than these proposals.
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
		// Names that were silent last come last, as their processes may be stopped: there may be time
		// for a few proposals only.
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
	if version != nil && errors.Is(why, hello.ErrUnknown) { // most likely the process with the other version has it
		why = &session.Unavailable{Reason: session.ReasonVersion, Err: fmt.Errorf("%w; %w", version, why)}
	}
	return why
}

// to is the place at which a search that finds nobody is noted: another address of the port may have a
// process.
func (q Search) to() Place { return Place{q.At.Dir, q.At.Namespace, q.To} }

// own is the place at which this process has its name if it accepts for the port: at all addresses alike.
func (q Search) own() Place {
	return Place{q.At.Dir, q.At.Namespace, netip.AddrPortFrom(netip.Addr{}, q.At.Peer.Port())}
}

func (q Search) nobody() error {
	if q.At.Dir != "" {
		return &session.Unavailable{Reason: session.ReasonNotServed,
			Err: fmt.Errorf("shm: %w, and no process in %s accepts for port %d", tcpid.ErrNotHere, q.At.Dir, q.At.Peer.Port())}
	}
	return &session.Unavailable{Reason: session.ReasonNoListener, Err: fmt.Errorf("shm: no process of user %d accepts for port %d", q.User, q.At.Peer.Port())}
}

// linkTries is how often the move is proposed to one process if the link ends before the process has
// taken the connection. The first link may be an old one to a process that has ended; the second is
// new.
const linkTries = 2

// ask proposes the move to one process. done: no other process need be tried.
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
		errors.Is(err, newconn.ErrNotTaken), reason.Is(err, session.ReasonNoListener, session.ReasonResources), // the process has not taken the connection
		reason.Is(err, session.ReasonVersion, session.ReasonProtocol), // nor has one of another version, as while a program is replaced
		errors.Is(err, unix.ECONNRESET), errors.Is(err, unix.EPIPE),   // the process has ended; if it had the other end, TCP ends too
		errors.Is(err, hello.ErrStays): // that process stays on TCP; it may have passed the connection on to another one
		return false, err
	case reason.Is(err, session.ReasonRefused), errors.Is(err, hello.ErrUndecided):
		q.noteFound(name)
	}
	return true, err
}

// noteFound remembers that the process with this name has the other end.
func (q Search) noteFound(name string) {
	Note(q.At, func(h *Hint) { h.last, h.user = name, q.User })
	if to := q.to(); !HintOf(to).nobodyAt.IsZero() {
		Note(to, func(h *Hint) { h.nobodyAt = time.Time{} })
	}
}
