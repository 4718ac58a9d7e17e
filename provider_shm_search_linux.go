package san

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/hello"
	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/reason"
	"github.com/sanconn/san/internal/tcpid"
	"github.com/sanconn/san/provider/shm"
)

const (
	// gapMost is how many names in a row may be free before a search asks only those that were
	// there before: one that is free takes some 20 µs. Each process takes the first that is free,
	// so there are gaps only where others have ended. Once in gapFor it looks behind them.
	gapMost = 4
	gapFor  = time.Second

	// answersIn is how long a process must have had for its answer to count as silent. One takes
	// much less, and most dials have more: who does nothing costs one of these, not each.
	answersIn = 20 * time.Millisecond

	// nobodyFor is how long a port of which nobody had a name is not asked for again: its
	// listener, most likely, does without this library.
	nobodyFor = time.Second
)

// names is where the processes that accept connections of a port have their names.
type names struct {
	dir  string         // "": in this network namespace
	peer netip.AddrPort // without the address in this network namespace, which all processes share
}

func namesHere(port uint16) names { return names{peer: netip.AddrPortFrom(netip.Addr{}, port)} }

// search looks for the process that has a connection's other end.
type search struct {
	hello.Offer
	at      names
	user    uint32                   // whose process it has to be, in this network namespace
	confirm func(hello.Answer) error // returns why an answer is not that process's
}

func (q search) run(ctx context.Context, h newconn.Handle, s settings) error {
	var why error
	found, done := false, false
	hint := shmPeers.of(q.at)
	asked := numbers(0)
	ask := func(n int) (there bool) {
		var err error
		end, ends := ctx.Deadline()
		hurried := ends && time.Until(end) < answersIn
		done, err = q.ask(ctx, h, s, n)
		there = errors.Is(err, hello.ErrUnknown) || !reason.Is(err, ReasonNoListener)
		found = found || there
		asked.set(n, true)
		silent := errors.Is(err, newconn.ErrNotTaken) || reason.Is(err, ReasonTimeout) && !errors.Is(err, hello.ErrUndecided)
		if !silent || !hurried {
			shmPeers.note(q.at, func(h *peerHint) {
				h.seen.set(n, there)
				h.silent.set(n, there && silent)
			})
		}
		switch { // who has it not may accept it yet
		case !there && ctx.Err() != nil: // others were not asked
			why = ctx.Err()
		case done, reason.Is(err, ReasonStays), there && !errors.Is(why, hello.ErrUnknown) && !reason.Is(why, ReasonStays):
			why = err
		}
		return there
	}
	if hint.known && !hint.silent.has(hint.last) {
		ask(hint.last)
	}
	if !found && !done && time.Since(shmPeers.of(q.to()).free) < nobodyFor {
		return q.nobody()
	}
	behind := time.Since(hint.searched) >= gapFor
	for n, gap := 0, 0; !done && n < shm.Numbers; n++ {
		switch {
		case asked.has(n), hint.silent.has(n):
			gap = 0
		case gap >= gapMost && !behind && !hint.seen.has(n):
		case ask(n):
			gap = 0
		default:
			gap++
		}
	}
	// Those that may have been stopped come last, in any order: there may be time for some alone.
	for _, n := range rand.Perm(shm.Numbers) {
		if !done && hint.silent.has(n) && !asked.has(n) {
			ask(n)
		}
	}
	if !found && !done {
		shmPeers.note(q.at, func(h *peerHint) { *h = peerHint{} })
		shmPeers.note(q.to(), func(h *peerHint) { h.free = time.Now() })
		return q.nobody()
	}
	if behind && !done { // what was found at once has looked at few
		shmPeers.note(q.at, func(h *peerHint) { h.searched = time.Now() })
	}
	return why
}

// to is what is remembered if no process is found: others of the port may serve another address.
func (q search) to() names { return names{q.at.dir, q.Ends.Remote} }

func (q search) nobody() error {
	if q.at.dir != "" {
		return &Unavailable{Reason: ReasonNotServed,
			Err: fmt.Errorf("shm: %w, and no process in %s accepts for port %d", tcpid.ErrNotHere, q.at.dir, q.at.peer.Port())}
	}
	return &Unavailable{Reason: ReasonNoListener, Err: fmt.Errorf("shm: no process accepts for port %d", q.at.peer.Port())}
}

// linkTries is how often a process is asked whose link ends before it has taken the connection:
// by a link that was there, as of a process that has ended since, and by one that is made afresh.
const linkTries = 2

// ask offers the connection to one process. done: no other one is worth asking.
func (q search) ask(ctx context.Context, h newconn.Handle, s settings, number int) (done bool, err error) {
	for range linkTries {
		done, err = q.askOnce(ctx, h, s, number)
		if done || !errors.Is(err, shm.ErrLinkGone) || ctx.Err() != nil {
			break
		}
	}
	return done, err
}

func (q search) askOnce(ctx context.Context, h newconn.Handle, s settings, number int) (done bool, err error) {
	if h.Life().(*life).guesses.Load() >= mostGuesses {
		return true, errTooManyGuesses
	}
	ep, err := shm.Dial(ctx, q.at.peer.Port(), number, q.user, shm.Config{Dir: q.at.dir})
	if err != nil {
		return ctx.Err() != nil || errors.Is(err, shm.ErrDirectory), err
	}
	err = offer(ctx, ep, s.session, h, q.Offer, q.confirm)
	switch {
	case err == nil, errors.Is(err, newconn.ErrNoAnswer):
		q.noteFound(number)
		return true, err
	case errors.Is(err, hello.ErrOther), errors.Is(err, hello.ErrImpostor),
		errors.Is(err, newconn.ErrNotTaken), reason.Is(err, ReasonNoListener, ReasonResources), // it has not taken it
		errors.Is(err, unix.ECONNRESET), errors.Is(err, unix.EPIPE), // it has ended; if it had the other end, so does TCP
		reason.Is(err, ReasonStays): // it may have passed the connection on to another one
		return false, err
	case reason.Is(err, ReasonRefused), errors.Is(err, hello.ErrUndecided):
		q.noteFound(number)
	}
	return true, err
}

// noteFound remembers who has the other end.
func (q search) noteFound(number int) {
	shmPeers.note(q.at, func(h *peerHint) { h.last, h.known = number, true })
	if to := q.to(); !shmPeers.of(to).free.IsZero() {
		shmPeers.note(to, func(h *peerHint) { h.free = time.Time{} })
	}
}

// shmPeers remembers what was found out of the processes of a port. These are hints: they may be
// of another address, or of a process that has ended.
var shmPeers peerHints

// mostHints bounds what is remembered; then all is forgotten. A process seldom has so many
// destinations on its host.
const mostHints = 4096

type peerHints struct {
	mu    sync.Mutex // guards hints
	hints map[names]*peerHint
}

// peerHint is of one port, but for free.
type peerHint struct {
	last     int // who had the last connection
	known    bool
	seen     numbers   // who was there when asked last
	silent   numbers   // who did not answer in time then
	searched time.Time // when all were asked

	free time.Time // of a destination: when nobody was found for it
}

// numbers is a set of processes' numbers.
type numbers uint64

func (s numbers) has(n int) bool { return s>>n&1 != 0 }

func (s *numbers) set(n int, in bool) {
	if *s &^= 1 << n; in {
		*s |= 1 << n
	}
}

var _ [64 - shm.Numbers]struct{} // they fit

// note changes what is remembered.
func (p *peerHints) note(of names, change func(*peerHint)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	hint := p.hints[of]
	if hint == nil {
		if len(p.hints) >= mostHints || p.hints == nil {
			p.hints = make(map[names]*peerHint)
		}
		hint = new(peerHint)
		p.hints[of] = hint
	}
	change(hint)
}

func (p *peerHints) of(at names) (hint peerHint) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if known := p.hints[at]; known != nil {
		hint = *known
	}
	return hint
}
