package session

import (
	"testing"
	"time"
)

// What a wait usually takes is about the median: the few that take much longer, as one
// of the two ends did not run, do not count.
func TestUsualWait(t *testing.T) {
	var h spinHistory
	const usual, outlier = 300 * time.Microsecond, 5 * time.Millisecond
	for i := range 1000 {
		took := usual
		if i%5 == 0 {
			took = outlier
		}
		h.ended(&waiter{since: 1, last: 1 + int64(took)})
	}
	if got := time.Duration(h.usual); got < usual*2/3 || got > usual*3/2 {
		t.Errorf("usually %v, want about %v", got, usual)
	}
	for range 200 {
		h.ended(&waiter{})
	}
	if got := time.Duration(h.usual); got > time.Microsecond {
		t.Errorf("usually %v after 200 that took no time", got)
	}
	// Each ends when giving way has let the peer run: the next one must not begin later.
	h = spinHistory{sliced: 1, long: true, usual: int64(usual)}
	for range 100 {
		h.ended(&waiter{since: 1, last: 2 + h.giveAfter(2), other: true})
	}
	if got := time.Duration(h.giveAfter(2)); got != giveEach {
		t.Errorf("gives way after %v where each wait ends by that, want %v", got, giveEach)
	}
}

// Who has a long slice gives way late, by what waits take; who has none, as ever.
func TestGiveAfter(t *testing.T) {
	now := int64(time.Hour)
	for _, tt := range []struct {
		long  bool
		usual time.Duration
		want  time.Duration
	}{
		{true, 0, giveEach},
		{true, 300 * time.Microsecond, 600 * time.Microsecond},
		{true, time.Second, longWait},
		{false, 300 * time.Microsecond, giveEach},
	} {
		h := spinHistory{sliced: now - 1, long: tt.long, usual: int64(tt.usual)}
		if got := time.Duration(h.giveAfter(now)); got != tt.want {
			t.Errorf("long %v, usually %v: first after %v, want %v", tt.long, tt.usual, got, tt.want)
		}
		if h.sliced != now-1 {
			t.Errorf("it asked the scheduler again after 1 ns")
		}
		h.giveAfter(now + int64(yieldEach))
		if h.sliced != now+int64(yieldEach) {
			t.Errorf("it did not ask the scheduler again after %v", yieldEach)
		}
	}
}

// A wait is for an answer if something was written since the wait before.
func TestHasAsked(t *testing.T) {
	var s Session
	var h spinHistory
	for i, tt := range []struct {
		writes uint64
		busy   bool // a Write is inside
		want   bool
	}{{0, false, false}, {64, false, true}, {0, false, false}, {1, true, false}, {0, false, true}} {
		s.tx.mu.Lock()
		s.tx.bytes += tt.writes
		if !tt.busy {
			s.tx.mu.Unlock()
		}
		if got := s.hasAsked(&h); got != tt.want {
			t.Errorf("step %d: %v, want %v", i, got, tt.want)
		}
		if tt.busy {
			s.tx.mu.Unlock()
		}
	}
}
