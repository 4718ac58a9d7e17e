package shm

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sanconn/san/session"
)

// News of a slot is reported once, with its kind, whichever slot it is. News of a slot that does not
// exist yet is reported when the slot is added.
func TestNewsAreHeardOnce(t *testing.T) {
	b := new(bell)
	var h seenCounts
	got := map[int]session.Events{}
	take := func() map[int]session.Events {
		clear(got)
		if h.pending(b) {
			h.collect(b, func(slot int, ev session.Events) { got[slot] |= ev })
		}
		return got
	}
	h.most.Store(firstSlots)
	for i := range 3 {
		b.tell(3, session.RecvReady)
		b.tell(3, session.RecvReady)
		b.tell(5, session.SendReady)
		b.tell(7, session.SendReady|session.RecvReady)
		if got := take(); len(got) != 3 || got[3] != session.RecvReady || got[5] != session.SendReady || got[7] != 3 {
			t.Errorf("round %d: %v", i, got)
		}
		if got := take(); len(got) != 0 {
			t.Errorf("again: %v", got)
		}
	}
	b.tell(linkSlots-1, session.RecvReady)
	if got := take(); len(got) != 0 {
		t.Errorf("of a slot that is not there: %v", got)
	}
	h.most.Store(linkSlots)
	if got := take(); len(got) != 1 || got[linkSlots-1] != session.RecvReady {
		t.Errorf("now that it is there: %v", got)
	}
	b.slots[0].Store(1<<32 - 1) // a counter that wraps reports too much rather than too little
	b.groups[0].Add(1)
	take()
	b.tell(0, session.RecvReady)
	if got := take(); got[0]&session.RecvReady == 0 {
		t.Errorf("behind the last number: %v", got)
	}
}

// An end that sets its alarm, looks once more, and finds no news is rung for the next news, at whatever
// moment that comes.
func TestWhoeverWaitsIsRung(t *testing.T) {
	const rounds = 100_000
	near, far := bells(t)
	var a waiters
	a.init(far, nil)
	var heard atomic.Uint64
	var rung atomic.Bool
	var ringing sync.WaitGroup
	ringing.Go(func() {
		for n := range uint64(rounds) {
			for heard.Load() < n {
				runtime.Gosched()
			}
			for range n * 7 % 50 { // at another moment in each round
				heard.Load()
			}
			near.own.tell(3, session.RecvReady)
			if near.rung.Ring(&near.peers.asleep) {
				rung.Store(true)
			}
		}
	})
	defer ringing.Wait()
	for heard.Load() < rounds {
		if !a.ready(^uintptr(0)) {
			end := time.Now().Add(patience)
			for n := 1; !rung.Load(); n++ {
				if n%64 == 0 {
					runtime.Gosched()
				}
				if n%1024 == 0 && time.Now().After(end) {
					t.Errorf("nobody rang for news %d", heard.Load())
					heard.Store(rounds)
					return
				}
			}
			rung.Store(false)
		}
		far.seen.collect(far.peers, func(int, session.Events) { heard.Add(1) })
	}
}
