package verbs

import (
	"context"
	"sync"
	"sync/atomic"
)

// await takes completions until met, which is called with mu held, returns true, or
// until the connection or ctx ends. It is for the provider's own waits (a greeting, an
// invalidation, the farewell), while the session may be waiting as well.
func (e *Endpoint) await(ctx context.Context, met func() bool) error {
	arrived := make(chan struct{}, 1)
	e.watchers.add(arrived)
	defer e.watchers.remove(arrived)
	for {
		e.notify()
		e.mu.Lock()
		e.drain()
		over := met()
		e.mu.Unlock()
		if over {
			return nil
		}
		if err := e.Err(); err != nil {
			return err
		}
		select {
		case <-arrived:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// alert wakes those who wait for completions in await.
func (e *Endpoint) alert() {
	w := &e.watchers
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
