package verbs

import (
	"context"
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
	for {
		arrived := q.watchers.next()
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

// watchers are those who wait in await: the channel for all of them, or nil.
type watchers struct{ arrived atomic.Pointer[chan struct{}] }

// next returns a channel that the next alert closes.
func (w *watchers) next() <-chan struct{} {
	for {
		if c := w.arrived.Load(); c != nil {
			return *c
		}
		c := make(chan struct{})
		w.arrived.CompareAndSwap(nil, &c)
	}
}

// alert wakes all of them.
func (w *watchers) alert() {
	if w.arrived.Load() == nil {
		return
	}
	if c := w.arrived.Swap(nil); c != nil {
		close(*c)
	}
}
