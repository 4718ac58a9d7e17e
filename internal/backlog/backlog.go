// Package backlog bounds the connections that a listener is setting up or that wait for
// Accept.
package backlog

import (
	"context"
	"slices"
	"sync"
	"time"
)

// Slow is for how long a connection that is being set up cannot lose its place in a full
// backlog: as long as dialers wait for a SAN by default. Once ready it keeps its place.
const Slow = 500 * time.Millisecond

// A Backlog has a fixed number of places. Its methods may be called concurrently.
type Backlog struct {
	size   int
	mu     sync.Mutex
	taken  int      // guarded by mu, like making
	making []*Place // the oldest first
}

// New returns a backlog of size places.
func New(size int) *Backlog { return &Backlog{size: size} }

// A Place is held by a connection that is being set up.
type Place struct {
	ctx    context.Context
	cancel context.CancelFunc
	in     *Backlog
	began  time.Time
}

// Begin returns a place for a new connection, or nil if there is none. If all are taken, but
// the oldest of those being set up has had its place for Slow or longer, the new one gets
// that and evicted is true: dialers that do not negotiate must not keep others out.
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

// Context ends when the limit given to Begin is over, when the place goes to another
// connection, and with End.
func (p *Place) Context() context.Context { return p.ctx }

// End ends the setting up of the connection; good means that it succeeded. If End returns
// true, the connection has a place until Leave: its own, or another if it had lost that.
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

// Leave frees the place of a connection for which End has returned true.
func (b *Backlog) Leave() {
	b.mu.Lock()
	b.taken--
	b.mu.Unlock()
}
