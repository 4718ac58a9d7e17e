// Package backlog bounds the connections that a listener is setting up or that wait for
// Accept.
package backlog

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"
)

// Slow is for how long a connection that is being set up cannot lose its place in a full
// backlog to one of the same user: as long as dialers wait for a SAN by default. Once ready
// it keeps its place.
const Slow = 500 * time.Millisecond

var (
	// ErrFull: all places are taken by connections that are ready.
	ErrFull = errors.New("the backlog is full")

	// ErrBusy: some places are taken by connections that are being set up, perhaps by
	// dialers that never will.
	ErrBusy = errors.New("the backlog is full, and not all in it have negotiated")

	// ErrLost is the cause of a Place's context that ends because another connection has
	// got the place.
	ErrLost = errors.New("the place in the backlog went to another connection")
)

// A Backlog has a fixed number of places. Its methods may be called concurrently.
type Backlog struct {
	size   int
	mu     sync.Mutex // guards what follows
	taken  int
	making []*Place       // the oldest first
	users  map[string]int // how many of making each has
}

// New returns a backlog of size places.
func New(size int) *Backlog { return &Backlog{size: size, users: make(map[string]int)} }

// A Place is held by a connection that is being set up.
type Place struct {
	in     *Backlog
	parent context.Context
	user   string
	began  time.Time
	limit  time.Duration

	// Guarded by in.mu. The context is made when it is wanted: the timer costs as much as
	// what a connection is set up with that waits for nothing.
	ctx    context.Context
	cancel context.CancelCauseFunc
	stop   context.CancelFunc // of the timer
	lost   bool
}

// Begin returns a place for a new connection of a user, for at most limit until End. If all
// are taken, connections that are being set up lose theirs: the oldest of the user that has
// most of them, if that has more than the new one's will have then; or else the oldest of
// all, if that has had it for Slow or longer. So dialers that do not negotiate keep nobody
// out. Otherwise the error is ErrFull or ErrBusy.
func (b *Backlog) Begin(ctx context.Context, user string, limit time.Duration) (*Place, error) {
	p := &Place{in: b, parent: ctx, user: user, began: time.Now(), limit: limit}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.taken >= b.size {
		if len(b.making) == 0 {
			return nil, ErrFull
		}
		lost := b.loserLocked(p)
		if lost == nil {
			return nil, ErrBusy
		}
		lost.loseLocked()
		b.removeLocked(lost)
	}
	b.making = append(b.making, p)
	b.users[user]++
	b.taken++
	return p, nil
}

// loserLocked returns the place that p gets; nil: none.
func (b *Backlog) loserLocked(p *Place) *Place {
	most := p.user
	for user, n := range b.users {
		if n > b.users[most] {
			most = user
		}
	}
	if b.users[most] > b.users[p.user]+1 {
		return b.making[slices.IndexFunc(b.making, func(q *Place) bool { return q.user == most })]
	}
	if oldest := b.making[0]; p.began.Sub(oldest.began) >= Slow {
		return oldest
	}
	return nil
}

// removeLocked frees a place, unless its connection had lost it.
func (b *Backlog) removeLocked(p *Place) {
	i := slices.Index(b.making, p)
	if i < 0 {
		return
	}
	b.making = slices.Delete(b.making, i, i+1)
	if b.users[p.user]--; b.users[p.user] == 0 {
		delete(b.users, p.user)
	}
	b.taken--
}

// Context ends when the limit given to Begin is over, when the place goes to another
// connection (ErrLost is its cause), and with End.
func (p *Place) Context() context.Context {
	p.in.mu.Lock()
	defer p.in.mu.Unlock()
	if p.ctx == nil {
		ctx, cancel := context.WithCancelCause(p.parent)
		p.ctx, p.stop = context.WithDeadline(ctx, p.began.Add(p.limit))
		p.cancel = cancel
		if p.lost {
			cancel(ErrLost)
		}
	}
	return p.ctx
}

func (p *Place) loseLocked() {
	p.lost = true
	if p.cancel != nil {
		p.cancel(ErrLost)
	}
}

// End ends the setting up of the connection; good means that it succeeded. If End returns
// true, the connection has a place until Leave: its own, or another if it had lost that.
func (p *Place) End(good bool) bool {
	b := p.in
	b.mu.Lock()
	defer b.mu.Unlock()
	if p.ctx != nil {
		p.stop()
		p.cancel(nil)
	}
	b.removeLocked(p)
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
