package san

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/session"
)

const (
	// firstUse is for how much use a connection by TCP moves: 32 turns, as sanconn counts them.
	// By then it has cost about as much more than on a SAN as the move costs, so one that ends
	// soon, or goes on, costs at most twice what was best for it. See docs/PERFORMANCE.md, "When
	// it pays to move".
	firstUse = 1 << 20

	// A move that fails is tried again after four times as much use, this often.
	moreUse   = 4
	mostTries = 4

	// moveTimeout bounds an attempt, requireTimeout one for which the program waits, as there
	// is nothing else to do: it must not fail only because processors are busy.
	moveTimeout    = 2 * time.Second
	requireTimeout = 10 * time.Second

	// mostMoving bounds how many connections move at a time, mostToOne those to one address and
	// port, whose process may be stopped. The others wait for their turn, and are used meanwhile:
	// a device that makes its queue pairs one by one is asked for no more than that at once.
	mostMoving = 16
	mostToOne  = mostMoving / 4

	// acceptPause is how long a connection that was not accepted yet is left alone, at first;
	// mostPause bounds its doubling, so that a dial that waits notices the accept.
	acceptPause = 50 * time.Microsecond
	mostPause   = 20 * time.Millisecond
)

// plan is how a dialer's connections move.
type plan struct {
	providers []provider
	without   *Unavailable // why there are none, or none is tried
	settings  settings
	atOnce    bool
}

// begin makes a connection of one that has been dialed by TCP; began: since when.
func (p *plan) begin(tcp *net.TCPConn, began time.Time) (*sanconn.Conn, newconn.Handle, *life) {
	l := new(life)
	l.why.Store(unused)
	for _, provider := range p.providers {
		provider.dialed(tcp, began, l, p.settings)
	}
	c, h := newconn.New(tcp, newconn.Config{
		Use:       func(h newconn.Handle) { p.moveLater(h, l, false) },
		Threshold: firstUse,
		Closed:    l.closed,
		Left:      l.left,
		Life:      l,
	})
	count(func(n *Counters) { n.Dialed[providerTCP]++ })
	return c.(*sanconn.Conn), h, l
}

// moveInBackground moves a connection without waiting until it has been used.
func (p *plan) moveInBackground(h newconn.Handle, l *life) {
	h.CallUse(never)
	p.moveLater(h, l, true)
}

// never is more than any connection is used for.
const never = int64(1) << 60

// unused is the reason of a connection that nothing has been tried for yet.
var unused = &Unavailable{Reason: ReasonUnused}

// move tries each provider in turn. It returns why the first, which is preferred, does not
// carry the connection, if none does; or, if the other end refuses one, that. One that has found
// the other end's host, and may carry it as soon as that has been accepted, is the last: or a
// connection within a host went by its NIC.
func (p *plan) move(ctx context.Context, h newconn.Handle, l *life) *Unavailable {
	if l.guesses.Load() >= mostGuesses {
		return errTooManyGuesses
	}
	var why *Unavailable
	for _, provider := range p.providers {
		err := provider.move(ctx, h, p.settings)
		switch {
		case err == nil:
			l.moved(provider.name(), true)
			l.why.Store(nil)
			return nil
		case errors.Is(err, newconn.ErrNoAnswer):
			return unavailableOf(err) // it may move yet, and nowhere else
		case errors.Is(err, errNotAccepted), errors.Is(err, errUnknown), errors.Is(err, newconn.ErrNotTaken):
			return unavailableOf(err)
		case why == nil, isReason(err, ReasonRefused): // it is not tried again
			why = unavailableOf(err)
		}
	}
	return why
}

var errTooManyGuesses = &Unavailable{Reason: ReasonOwner, Err: errImpostor}

// moveNow moves a connection that must not be used before, in its turn and once its other end
// has been accepted.
func (p *plan) moveNow(ctx context.Context, h newconn.Handle, l *life) *Unavailable {
	done := make(chan *Unavailable, 1)
	j := &job{plan: p, h: h, life: l, ctx: ctx, waits: true, done: func(why *Unavailable) { done <- why }}
	movers.add(j)
	select {
	case why := <-done:
		if why == nil {
			if err := h.Moved(ctx); err != nil {
				why = unavailableOf(err)
			}
		}
		return why
	case <-ctx.Done(): // the job ends with it
		if why := j.passing.Load(); why != nil {
			return &Unavailable{Reason: why.Reason, Err: fmt.Errorf("%w: %w", ctx.Err(), why.Err)}
		}
		return unavailableOf(ctx.Err())
	}
}

var errEnded = &Unavailable{Reason: ReasonStays, Err: errors.New("it has ended")}

var errNotAccepted = errors.New("shm: the other end has not been accepted yet")

// moveLater moves a connection in the background. atOnce: as soon as its other end has been
// accepted.
func (p *plan) moveLater(h newconn.Handle, l *life, atOnce bool) {
	movers.add(&job{plan: p, h: h, life: l, ctx: context.Background(), waits: atOnce, done: func(why *Unavailable) {
		if why == nil {
			return
		}
		if h.Ended() { // so nothing has been found out of its other end, which may have gone
			if l.why.Load() != unused {
				return
			}
			why = errEnded
		}
		l.failed(why)
		if n := l.tries.Add(1); n < mostTries && why.Reason != ReasonRefused {
			use := int64(firstUse)
			for range n {
				use *= moreUse
			}
			h.CallUse(use)
		}
	}})
}

// job is a connection that is to move.
type job struct {
	plan  *plan
	h     newconn.Handle
	life  *life
	ctx   context.Context
	waits bool               // for its other end to be accepted
	done  func(*Unavailable) // called once; nil: it moves. It does not block

	// Set by movers.
	peer  netip.AddrPort // guarded by their mu
	left  time.Duration  // of its time, which passes while it runs or pauses, not while it waits for its turn
	pause time.Duration  // the last one

	passing atomic.Pointer[Unavailable] // why it waits
}

// run is an attempt to move.
func (j *job) run() {
	began := time.Now()
	ctx, cancel := context.WithTimeout(j.ctx, j.left)
	defer cancel()
	why := j.plan.move(ctx, j.h, j.life)
	if why != nil && j.waits && isPassing(why) {
		if ctx.Err() == nil {
			j.passing.Store(why)
			j.pause = min(max(2*j.pause, acceptPause), mostPause)
			j.left -= time.Since(began) + j.pause
			time.AfterFunc(j.pause, func() { movers.add(j) })
			return
		}
		why = cmp.Or(j.passing.Load(), why) // of the last attempt that had its time
	}
	j.done(why)
}

// isPassing reports whether the next attempt may come to more, with time left for it.
func isPassing(why *Unavailable) bool {
	slow := why.Reason == ReasonTimeout && !errors.Is(why, newconn.ErrNoAnswer)
	return slow || errors.Is(why, errNotAccepted) || errors.Is(why, errUnknown)
}

// movers move connections, those that a dial waits for and those in the background.
var movers = moverPool{at: make(map[netip.AddrPort]int)}

type moverPool struct {
	mu      sync.Mutex // guards what follows
	waiting []*job
	running int
	at      map[netip.AddrPort]int // how many are running, by their peer
}

// add has a job run when it is its turn. It does not block.
func (m *moverPool) add(j *job) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !j.peer.IsValid() { // the first time
		j.peer = j.h.TCP().RemoteAddr().(*net.TCPAddr).AddrPort()
		j.left = j.plan.settings.attempt
	}
	m.waiting = append(m.waiting, j)
	m.startLocked()
}

// startLocked runs those whose turn it is. Each is bounded by its time.
func (m *moverPool) startLocked() {
	for m.running < mostMoving {
		i := slices.IndexFunc(m.waiting, func(j *job) bool { return m.at[j.peer] < mostToOne })
		if i < 0 {
			return
		}
		j := m.waiting[i]
		m.waiting = slices.Delete(m.waiting, i, i+1)
		m.running++
		m.at[j.peer]++
		go func() {
			j.run()
			m.ran(j)
		}()
	}
}

func (m *moverPool) ran(j *job) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.running--
	if m.at[j.peer]--; m.at[j.peer] == 0 {
		delete(m.at, j.peer)
	}
	m.startLocked()
}

// offer offers the process at an endpoint to move a connection to it. confirm returns why an
// answer is not from the connection's other end.
func offer(ctx context.Context, ep session.Endpoint, cfg session.Config, h newconn.Handle, offer hello, confirm func(answer) error) error {
	var s *session.Session
	notes := h.Notes()
	cfg.OnNote = func(note []byte) { notes(s, note) } // there is none before Negotiate
	s = session.New(ep, cfg)
	err := h.Offer(ctx, s, offer.encode(), func(b []byte) error {
		a, err := parseAnswer(b)
		if err != nil {
			return err
		}
		if a.code == answerMoves || a.code == answerRefused { // what counts for good is the other end's word
			if err := confirm(a); err != nil {
				return err
			}
		}
		return a.err()
	})
	if err != nil && !errors.Is(err, newconn.ErrNoAnswer) {
		s.Abort()
	}
	return err
}
