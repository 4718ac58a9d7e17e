package verbs

import (
	"context"
	"sync/atomic"

	"github.com/sanconn/san/session"
)

// notify requests an announcement of the next completion, unless one is requested already. When it
// returns, the request has been made by this or another goroutine, because notified is set and acted on
// with mu held.
func (q *queuePair) notify() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed || !q.notified.CompareAndSwap(false, true) {
		return
	}
	if err := q.cq.Notify(); err != nil {
		q.failLocked(deviceError(err))
	}
}

// notice is called by the device's waiter when the completion queue announces a completion. The order
// matters: an arm at this moment either finds that a new request is needed, or its events are seen
// below.
func (q *queuePair) notice() {
	q.notified.Store(false)
	if ev := session.Events(q.armed.Swap(0)); ev != 0 {
		q.wake(ev)
	}
	q.watchers.alert()
	q.mu.Lock()
	if q.cause != nil {
		q.drainLocked()
	}
	q.mu.Unlock()
}

// drainLocked reaps all completions, and then publishes the end of the connection, if it is due.
func (q *queuePair) drainLocked() {
	q.reapLocked()
	q.publishFlushedLocked()
}

// dryPolls is how often one call into C polls a queue that was empty at the last poll: most likely the
// caller waits, and a poll takes a fraction of the call.
const dryPolls = 8

// reapLocked reaps completions without publishing the end.
func (q *queuePair) reapLocked() {
	if q.closed {
		return
	}
	q.reaping = true
	defer func() { q.reaping = false }()
	for {
		times := 1
		if q.dry {
			times = dryPolls
		}
		n, err := q.cq.Spin(q.wcs[:], times)
		q.dry = n == 0
		if err != nil {
			q.failLocked(deviceError(err))
			return
		}
		for i := range q.wcs[:n] {
			q.user.completedLocked(&q.wcs[i])
		}
		if n < len(q.wcs) {
			return
		}
	}
}

// awaitLooks is how often await looks before it sleeps, which takes about 10 µs: an invalidation takes
// a device a few, and an interrupt costs more.
const awaitLooks = 16

// await reaps completions until met, which is called with mu held, returns true, or until the
// connection or ctx ends. It serves the provider's own waits (iWARP's first message, an invalidation,
// what Close sends), while the session may be waiting as well.
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
		if err := q.reported(); err != nil {
			return err
		}
		select {
		case <-arrived:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// watchers are the goroutines that wait in await: one channel for all of them, or nil.
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

// alert wakes all watchers.
func (w *watchers) alert() {
	if w.arrived.Load() == nil {
		return
	}
	if c := w.arrived.Swap(nil); c != nil {
		close(*c)
	}
}
