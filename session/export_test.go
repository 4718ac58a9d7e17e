package session

import (
	"reflect"
	"sync/atomic"
	"testing"
	"time"
)

// IdlePollerGone reports whether the idle poller does not run. The idle poller belongs to the bubble
// whose session started it, so a simulation starts only when there is none.
func IdlePollerGone() bool {
	idlers.mu.Lock()
	defer idlers.mu.Unlock()
	return !idlers.runs
}

// LengthsKept returns the most entries in the queue of lengths of RDMA writes, while underWay writes are
// in progress and, times times, one more begins and the oldest ends.
func LengthsKept(t *testing.T, underWay, times int) (most int) {
	var q fifo[int]
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

// BrokenDirect is what a Read that waits for transfers into its slice calls after each look.
func (s *Session) BrokenDirect() bool {
	s.lockRx()
	defer s.unlockRx()
	return s.directBrokenLocked()
}

// Await waits as a Read does, as long as more returns true. more is called without a lock.
func (s *Session) Await(more func() bool) {
	s.rd.begin()
	defer s.rd.op.Unlock()
	s.await(&s.rd, RecvReady, func(bool) Events {
		if more() {
			return RecvReady
		}
		return 0
	})
}

// Move records that bytes have moved, Moved returns how often they have, and WakeRead makes a Read look
// again.
func (s *Session) Move()         { s.advances.Add(1) }
func (s *Session) Moved() uint64 { return s.advances.Load() }
func (s *Session) WakeRead()     { s.rd.signal() }

// SetSpin sets how long waits poll from now on. No operation may be in progress.
func (s *Session) SetSpin(d time.Duration) { s.spin = d }

// KeepAliveOn and KeepAlivePeriod set one field by SetKeepAlive.
func (s *Session) KeepAliveOn(on bool)             { s.SetKeepAlive(KeepAlive{On: &on}) }
func (s *Session) KeepAlivePeriod(d time.Duration) { s.SetKeepAlive(KeepAlive{Period: &d}) }

// HoldReceiver holds the receiver's lock until release is called, as a stuck operation does.
func (s *Session) HoldReceiver() (release func()) {
	s.rxMu.Lock()
	return s.rxMu.Unlock
}

// CountFrom makes the session count messages as if n had gone each way before. It is called at both ends
// before either negotiates.
func (s *Session) CountFrom(n uint32) {
	s.rxMu.Lock() // nobody finds credit due meanwhile
	defer s.rxMu.Unlock()
	s.txMu.Lock()
	defer s.txMu.Unlock()
	counts := reflect.ValueOf(&s.credits).Elem()
	for _, name := range []string{"sent", "marked"} {
		*(*uint32)(counts.FieldByName(name).Addr().UnsafePointer()) += n
	}
	for _, name := range []string{"peerFreed", "received", "freed", "advertised"} {
		(*atomic.Uint32)(counts.FieldByName(name).Addr().UnsafePointer()).Add(n)
	}
}
