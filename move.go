package san

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/session"
)

const (
	// firstUse is for how much use a connection by TCP moves where the link to the process at
	// its other end has still to be made, and nearUse where it is there: 8 turns and 2, as
	// sanconn counts them. See docs/PERFORMANCE.md, "When it pays to move".
	firstUse = 256 << 10
	nearUse  = 64 << 10

	// A move that fails is tried again after four times as much use, this often.
	moreUse   = 4
	mostTries = 4

	// moveTimeout bounds an attempt, requireTimeout one for which the program waits, as there
	// is nothing else to do: it must not fail only because processors are busy.
	moveTimeout    = 2 * time.Second
	requireTimeout = 10 * time.Second

	// mostMoving bounds how many connections move at a time. The others wait for their turn,
	// and are used meanwhile: a device that makes its queue pairs one by one is asked for no
	// more than that at once.
	mostMoving = 16

	// acceptPause is how long a connection that was not accepted yet is left alone, at first;
	// mostPause bounds its doubling, so that a dial that waits notices the accept.
	acceptPause = 50 * time.Microsecond
	mostPause   = 20 * time.Millisecond
)

// plan is how a dialer's connections move.
type plan struct {
	providers []provider
	settings  settings
	atOnce    bool
}

// begin makes a connection of one that has been dialed by TCP.
func (p *plan) begin(tcp *net.TCPConn) (*sanconn.Conn, newconn.Handle, *life) {
	l := &life{dialed: true}
	l.why.Store(unused)
	threshold := int64(firstUse)
	for _, provider := range p.providers {
		if provider.dialed(tcp, l, p.settings) {
			threshold = nearUse
		}
	}
	c, h := newconn.New(tcp, newconn.Config{
		Use:       func(h newconn.Handle) { movers.add(job{p, h, l}) },
		Threshold: threshold,
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
	movers.add(job{p, h, l})
}

// never is more than any connection is used for.
const never = int64(1) << 60

// unused is the reason of a connection that nothing has been tried for yet.
var unused = &Unavailable{Reason: ReasonUnused}

// move tries each provider in turn. It returns why the first, which is preferred, does not
// carry the connection, if none does.
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
		case why == nil:
			why = unavailableOf(err)
		}
	}
	return why
}

var errTooManyGuesses = &Unavailable{Reason: ReasonOwner, Err: errImpostor}

// moveNow moves a connection that must not be used before, waiting until its other end has
// been accepted.
func (p *plan) moveNow(ctx context.Context, h newconn.Handle, l *life) *Unavailable {
	for pause := acceptPause; ; pause = min(2*pause, mostPause) {
		why := p.moveInTurn(ctx, h, l)
		if why == nil {
			if err := h.Moved(ctx); err != nil {
				return unavailableOf(err)
			}
			return nil
		}
		slow := why.Reason == ReasonTimeout && !errors.Is(why, newconn.ErrNoAnswer) // and ctx has time left
		if !slow && !errors.Is(why, errNotAccepted) && !errors.Is(why, errUnknown) {
			return why
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return &Unavailable{Reason: why.Reason, Err: fmt.Errorf("%w: %w", ctx.Err(), why.Err)}
		}
	}
}

// turns has a token for each move that a dial waits for, of which there are as many at a time
// as in the background: more would only be slower.
var turns = make(chan struct{}, mostMoving)

// moveInTurn is move, when it is this connection's turn.
func (p *plan) moveInTurn(ctx context.Context, h newconn.Handle, l *life) *Unavailable {
	select {
	case turns <- struct{}{}:
		defer func() { <-turns }()
		return p.move(ctx, h, l)
	case <-ctx.Done():
		return unavailableOf(ctx.Err())
	}
}

var errNotAccepted = errors.New("shm: the other end has not been accepted yet")

// job is a connection that is to move.
type job struct {
	plan *plan
	h    newconn.Handle
	life *life
}

// movers move connections in the background.
var movers moverPool

type moverPool struct {
	mu      sync.Mutex // guards what follows
	waiting []job
	running int
}

// add has a connection moved. It does not block.
func (m *moverPool) add(j job) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.waiting = append(m.waiting, j)
	if m.running < mostMoving {
		m.running++
		go m.run() // it ends with the last job; each is bounded by moveTimeout
	}
}

func (m *moverPool) run() {
	for {
		m.mu.Lock()
		if len(m.waiting) == 0 {
			m.running--
			m.waiting = nil
			m.mu.Unlock()
			return
		}
		j := m.waiting[0]
		m.waiting[0] = job{}
		m.waiting = m.waiting[1:]
		m.mu.Unlock()
		j.run()
	}
}

func (j job) run() {
	ctx, cancel := context.WithTimeout(context.Background(), j.plan.settings.attempt)
	defer cancel()
	var why *Unavailable
	if j.plan.atOnce {
		why = j.plan.moveNow(ctx, j.h, j.life)
	} else {
		why = j.plan.move(ctx, j.h, j.life)
	}
	if why == nil {
		return
	}
	j.life.failed(why)
	if n := j.life.tries.Add(1); n < mostTries {
		use := int64(firstUse)
		for range n {
			use *= moreUse
		}
		j.h.CallUse(use)
	}
}

// offer offers the process at an endpoint to move a connection to it. confirm returns why an
// answer is not from the connection's other end.
func offer(ctx context.Context, ep session.Endpoint, cfg session.Config, h newconn.Handle, offer hello, confirm func(answer) error) error {
	var s *session.Session
	notes := h.Notes()
	cfg.OnNote = func(note []byte) { notes(s, note) } // there is none before Negotiate
	s = session.New(ep, cfg)
	if err := s.Negotiate(ctx); err != nil {
		s.Abort()
		return fmt.Errorf("negotiating: %w", err)
	}
	err := h.Offer(s, offer.encode(), func(b []byte) error {
		a, err := parseAnswer(b)
		if err == nil {
			err = a.err()
		}
		if err == nil {
			err = confirm(a)
		}
		return err
	})
	if err != nil && !errors.Is(err, newconn.ErrNoAnswer) {
		s.Abort()
	}
	return err
}
