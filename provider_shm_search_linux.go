package san

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/tcpid"
	"github.com/sanconn/san/provider/shm"
)

const (
	// gapMost is how many names in a row may be free before the search for a process ends.
	// Each takes the first that is free, so there are gaps only where processes have ended.
	gapMost = 4

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
	hello
	at      names
	user    uint32             // whose process it has to be, in this network namespace
	confirm func(answer) error // returns why an answer is not that process's
}

func (q search) run(ctx context.Context, h newconn.Handle, s settings) error {
	var why error
	found, done := false, false
	ask := func(n int) (there bool) {
		var err error
		done, err = q.ask(ctx, h, s, n)
		unknown := errors.Is(err, errUnknown)
		there = unknown || !isReason(err, ReasonNoListener)
		found = found || there
		if done || there && !errors.Is(why, errUnknown) { // who has it not may accept it yet
			why = err
		}
		return there
	}
	last, known := shmPeers.last(q.at)
	if known {
		ask(last)
	}
	if !found && !done && shmPeers.nobody(q.to()) {
		return q.nobody()
	}
	for n, gap := 0, 0; !done && n < shm.Numbers && gap < gapMost; n++ {
		if gap++; known && n == last || ask(n) {
			gap = 0
		}
	}
	if !found && !done {
		shmPeers.noteNobody(q.at, q.to())
		return q.nobody()
	}
	return why
}

// to is what is remembered if no process is found: others of the port may serve another address.
func (q search) to() names { return names{q.at.dir, q.ends.Remote} }

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
	err = offer(ctx, ep, s.session, h, q.hello, q.confirm)
	switch {
	case err == nil, errors.Is(err, newconn.ErrNoAnswer):
		shmPeers.note(q.at, q.to(), number)
		return true, err
	case errors.Is(err, errUnknown), errors.Is(err, errOther), errors.Is(err, errImpostor), errors.Is(err, newconn.ErrNotTaken),
		isReason(err, ReasonNoListener), isReason(err, ReasonResources): // it has not taken it
		return false, err
	case errors.Is(err, unix.ECONNRESET), errors.Is(err, unix.EPIPE): // it has ended; if it had the other end, so does TCP
		return false, err
	case isReason(err, ReasonStays), isReason(err, ReasonRefused):
		shmPeers.note(q.at, q.to(), number)
	}
	return true, err
}

// shmPeers remembers which process had the last connection. It is a hint: what it says of a
// port may be of another address, or of a process that has ended.
var shmPeers peerHints

// mostHints bounds what is remembered; then all is forgotten. A process seldom has so many
// destinations on its host.
const mostHints = 4096

type peerHints struct {
	mu     sync.Mutex // guards what follows
	number map[names]int
	free   map[names]time.Time // when nobody was found for it
}

func (p *peerHints) last(at names) (number int, known bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	number, known = p.number[at]
	return number, known
}

func (p *peerHints) note(at, to names, number int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.number) >= mostHints || p.number == nil {
		p.number = make(map[names]int)
	}
	p.number[at] = number
	delete(p.free, to)
}

func (p *peerHints) nobody(at names) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	when, noted := p.free[at]
	return noted && time.Since(when) < nobodyFor
}

func (p *peerHints) noteNobody(at, to names) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.free) >= mostHints || p.free == nil {
		p.free = make(map[names]time.Time)
	}
	p.free[to] = time.Now()
	delete(p.number, at)
}
