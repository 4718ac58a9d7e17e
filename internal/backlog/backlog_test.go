package backlog

import (
	"testing"
	"testing/synctest"
	"time"
)

// A place that goes to another connection is counted once. A connection that has lost its
// place but succeeds gets one that has become free.
func TestPlaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := New(1)
		for _, free := range []bool{false, true} {
			slow, evicted := b.Begin(t.Context(), time.Minute)
			if slow == nil || evicted {
				t.Fatalf("of an empty backlog: %v, another's: %v", slow, evicted)
			}
			time.Sleep(Slow)
			second, evicted := b.Begin(t.Context(), time.Minute)
			if second == nil || !evicted || slow.Context().Err() == nil {
				t.Fatal("the place of a slow connection was not given to another")
			}
			if p, _ := b.Begin(t.Context(), time.Minute); p != nil || second.Context().Err() != nil {
				t.Error("a connection that is not slow lost its place")
			}
			if !second.End(true) {
				t.Error("a connection with a place has none")
			}
			time.Sleep(Slow)
			if p, _ := b.Begin(t.Context(), time.Minute); p != nil {
				t.Error("a connection that is ready lost its place")
			}
			if free {
				b.Leave() // accepted
			}
			if slow.End(true) != free {
				t.Errorf("a free place: %v", !free)
			}
			if b.Leave(); b.taken != 0 || len(b.making) != 0 {
				t.Errorf("%d places too many, %d are being made", b.taken, len(b.making))
			}
		}
	})
}

// A connection that fails has no place afterwards, whether it had lost it or not. Its
// context ends when its time is up, at the latest.
func TestPlacesInVain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := New(1)
		slow, _ := b.Begin(t.Context(), time.Hour)
		time.Sleep(Slow)
		next, _ := b.Begin(t.Context(), time.Second)
		if slow.End(false) || b.taken != 1 {
			t.Errorf("%d places are taken, want that of the second", b.taken)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if next.Context().Err() == nil {
			t.Error("its time is not up")
		}
		if next.End(false) || b.taken != 0 {
			t.Errorf("%d places are taken", b.taken)
		}
	})
}
