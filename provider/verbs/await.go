package verbs

import (
	"context"
	"sync"
	"sync/atomic"
)

// awaitLooks is how often await looks before it sleeps: for about 10 µs, as a device takes
// a few for an invalidation, and an interrupt costs more.
const awaitLooks = 16

// await takes completions until met, which is called with mu held, returns true, or
// until the connection or ctx ends. It is for the provider's own waits (iWARP's first
// message, an invalidation, what Close sends), while the session may be waiting as well.
func (q *queuePair) await(ctx context.Context, met func() bool) error {
	look := func() bool {
		q.mu.Lock()
		defer q.mu.Unlock()
		q.drainLocked()
		return met()
	}
	for range awaitLooks {
		if look() {
			return nil
		}
	}
	arrived := make(chan struct{}, 1)
	q.watchers.add(arrived)
	defer q.watchers.remove(arrived)
	for {
		q.notify()
		if look() {
			return nil
		}
		if err := q.ended(); err != nil {
			return err
		}
		select {
		case <-arrived:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// watchers are the channels of those who wait in await.
type watchers struct {
	n  atomic.Int32 // how many
	mu sync.Mutex
	m  map[chan struct{}]struct{} // guarded by mu
}

func (w *watchers) add(c chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.m == nil {
		w.m = make(map[chan struct{}]struct{})
	}
	w.m[c] = struct{}{}
	w.n.Add(1)
}

func (w *watchers) remove(c chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.m, c)
	w.n.Add(-1)
}

// alert wakes all of them.
func (w *watchers) alert() {
	if w.n.Load() == 0 {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for c := range w.m {
		select {
		case c <- struct{}{}:
		default:
		}
	}
}
