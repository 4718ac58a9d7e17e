package session

import "testing"

// JanitorIdle reports whether the goroutine that serves idle sessions has ended.
// It belongs to the bubble whose session started it: a simulation starts only
// when there is none.
func JanitorIdle() bool {
	idlers.mu.Lock()
	defer idlers.mu.Unlock()
	return idlers.timer == nil
}

// LengthsKept is the most that the queue of lengths of RDMA writes remembers, while
// so many are under way and one is begun and another ends so many times.
func LengthsKept(t *testing.T, underWay, times int) (most int) {
	var q queue[int]
	for i := range underWay + times {
		q.push(i)
		most = max(most, len(q.items))
		if i < underWay {
			continue
		}
		if n, ok := q.pop(); !ok || n != i-underWay {
			t.Fatalf("it gives %d, %v instead of %d", n, ok, i-underWay)
		}
	}
	return most
}

// BrokenDirect is what a Read that waits for transfers to its slice asks between its looks.
func (s *Session) BrokenDirect() (n int, broken bool) { return s.brokenDirect() }

// HoldReceiver keeps what guards the receiver until release, as an operation does that is stuck.
func (s *Session) HoldReceiver() (release func()) {
	s.rxMu.Lock()
	return s.rxMu.Unlock
}
