package shm

import (
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sanconn/san/provider/shm/internal/ring"
)

// stepped is a reclaimer whose passes each wait for the test.
type stepped struct {
	reclaimer
	passes chan struct{}
	again  chan bool // whether the pass leaves something to do
}

func newStepped() *stepped {
	r := &stepped{passes: make(chan struct{}), again: make(chan bool)}
	r.reclaimer.sweep = func() bool { r.passes <- struct{}{}; return <-r.again }
	return r
}

// wantPass lets the reclaimer make a pass.
func (r *stepped) wantPass(t *testing.T, again bool) {
	t.Helper()
	select {
	case <-r.passes:
		r.again <- again
	case <-time.After(patience):
		t.Fatal("no pass")
	}
}

// wantRest waits until no further pass is due.
func (r *stepped) wantRest(t *testing.T) {
	t.Helper()
	for end := time.Now().Add(patience); ; runtime.Gosched() {
		if r.sweeping.TryLock() {
			r.mu.Lock()
			due := r.due
			r.mu.Unlock()
			r.sweeping.Unlock()
			if !due {
				return
			}
		}
		if time.Now().After(end) {
			t.Fatal("it does not rest")
		}
	}
}

// Passes go on while there is memory to return, and end when there is none. They begin again when the
// reclaimer is woken, also during a pass.
func TestReclaimerRunsWhileThereIsSomethingToDo(t *testing.T) {
	r := newStepped()
	r.schedule()
	r.schedule()
	r.wantPass(t, true)
	r.wantPass(t, true)
	r.wantPass(t, false)
	r.wantRest(t)
	r.schedule()
	<-r.passes
	r.schedule() // during the pass
	r.again <- false
	r.wantPass(t, false)
	r.wantRest(t)
}

// stop waits for a pass that is running, and none follows it.
func TestReclaimerStopsBehindItsPass(t *testing.T) {
	r := newStepped()
	r.schedule()
	<-r.passes
	stopped := make(chan struct{})
	go func() { r.stop(); close(stopped) }()
	for {
		r.mu.Lock()
		done := r.stopped
		r.mu.Unlock()
		if done {
			break
		}
		runtime.Gosched()
	}
	select {
	case <-stopped:
		t.Error("stop does not wait for a pass")
	default:
	}
	r.again <- true
	<-stopped
	r.schedule()
	if r.due {
		t.Error("it runs after stop")
	}
}

// Pages stay for some ticks. Then they are returned, unless a connection takes them or they cannot be
// freed.
func TestCachedPages(t *testing.T) {
	const n = 2 * ring.Start
	var freed atomic.Uint64
	free := func(n uint64) bool { freed.Store(n); return true }
	var p cachedPages
	if p.reclaim(free) || p.get() != 0 {
		t.Error("there are pages that nobody has left")
	}
	p.put(n)
	for range cacheTicks - 1 {
		if !p.reclaim(free) || freed.Load() != 0 {
			t.Error("given back before their time")
		}
	}
	if p.reclaim(func(uint64) bool { return false }) == false || p.bytes != n {
		t.Error("lost, though they could not be freed")
	}
	if p.reclaim(free) || freed.Load() != n || p.get() != 0 {
		t.Errorf("%d of %d bytes were given back", freed.Load(), n)
	}
	p.put(n)
	if p.get() != n || p.reclaim(free) {
		t.Error("the next connection did not take them over")
	}
}

// get waits while a reclaim is running.
func TestTakingPagesThatAreBeingGivenBack(t *testing.T) {
	var p cachedPages
	taken := make(chan uint64, 1)
	p.put(2 * ring.Start)
	p.ticks = 1
	p.reclaim(func(uint64) bool {
		go func() { taken <- p.get() }()
		for range 100_000 { // long enough to notice if it does not wait
			runtime.Gosched()
		}
		if len(taken) > 0 {
			t.Error("taken while they are given back")
		}
		return true
	})
	if n := <-taken; n != 0 {
		t.Errorf("%d bytes were taken that had been given back", n)
	}
}
