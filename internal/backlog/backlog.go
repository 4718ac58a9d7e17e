// Package backlog has the places of connections that a listener is making, or that wait
// for Accept.
package backlog

import (
	"context"
	"slices"
	"sync"
	"time"
)

// Slow is how long a connection that is being made keeps its place when the backlog is
// full: as long as dialers wait for a SAN by default. One that is ready keeps it.
const Slow = 500 * time.Millisecond

// A Backlog has so many places. Its methods may be called concurrently.
type Backlog struct {
	size   int
	mu     sync.Mutex
	taken  int      // guarded by mu, as making
	making []*Place // the oldest first
}

// New returns a backlog of size places.
func New(size int) *Backlog { return &Backlog{size: size} }

// Place is that of a connection which is being made.
type Place struct {
	ctx    context.Context
	cancel context.CancelFunc
	in     *Backlog
	began  time.Time
}

// Begin gives a connection a place; nil: there is none. When all are taken it is that of
// the connection which has been made for longest, if that is too long, and evicted is
// true: who connects and says nothing must not keep others out.
func (b *Backlog) Begin(ctx context.Context, limit time.Duration) (p *Place, evicted bool) {
	p = &Place{in: b, began: time.Now()}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.taken >= b.size {
		if len(b.making) == 0 || p.began.Sub(b.making[0].began) < Slow {
			return nil, false
		}
		b.making[0].cancel()
		b.making = slices.Delete(b.making, 0, 1)
		b.taken--
		evicted = true
	}
	p.ctx, p.cancel = context.WithTimeout(ctx, limit)
	b.making = append(b.making, p)
	b.taken++
	return p, evicted
}

// Context ends when the time is up that Begin was given, when the place goes to another,
// and with End.
func (p *Place) Context() context.Context { return p.ctx }

// End says what has come of the connection. A good one has a place if the answer is true,
// until Leave: its own, or one that has become free since it lost that.
func (p *Place) End(good bool) bool {
	p.cancel()
	b := p.in
	b.mu.Lock()
	defer b.mu.Unlock()
	if i := slices.Index(b.making, p); i >= 0 {
		b.making = slices.Delete(b.making, i, i+1)
		b.taken--
	}
	if !good || b.taken >= b.size {
		return false
	}
	b.taken++
	return true
}

// Leave frees the place of a connection that was ready.
func (b *Backlog) Leave() {
	b.mu.Lock()
	b.taken--
	b.mu.Unlock()
}
