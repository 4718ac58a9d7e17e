package verbs

import (
	"context"
	"sync/atomic"

	"github.com/sanconn/san/session"
)

// notify makes the completion queue announce its next completion, unless it will do so
// already. When it returns the request has been made, by whomever: notified is set and
// acted on under mu.
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

// notice is called by the device's waiter when the completion queue announces
// something. The order matters: an arm that comes now either finds that the
// queue needs another request, or its events are seen below.
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

// drainLocked takes what the completion queue has, and publishes the end behind all of it.
func (q *queuePair) drainLocked() {
	q.reapLocked()
	q.publishFlushedLocked()
}

// dryPolls is how often one call into C polls a queue that was empty last time: the
// caller most likely waits, and a poll takes a fraction of the call.
const dryPolls = 8

// reapLocked reaps completions without publishing an end.
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
