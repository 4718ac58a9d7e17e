package san

import (
	"net/netip"
	"testing"
	"time"
)

// has reports whether the destination is not to be tried.
func (m *memory) has(k attemptKey, now time.Time) bool { return m.until(k, now) > 0 }

func key(n int) attemptKey {
	return attemptKey{provider: "shm", dst: netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), uint16(n))}
}

func TestMemoryHoldsAFailureForAWhile(t *testing.T) {
	var m memory
	now := time.Now()
	for _, span := range []time.Duration{rememberFirst, 2 * rememberFirst, 4 * rememberFirst} {
		m.add(key(1), now, true)
		m.add(key(1), now.Add(1), true) // one that ran beside it
		if !m.has(key(1), now.Add(span-1)) {
			t.Errorf("forgot before %v", span)
		}
		if now = now.Add(span); m.has(key(1), now) {
			t.Errorf("remembers for more than %v", span)
		}
	}
	for range 20 {
		m.add(key(1), now, true)
		now = now.Add(rememberMost)
	}
	if m.has(key(1), now) {
		t.Error("remembers for ever longer")
	}
	if m.has(key(2), now) {
		t.Error("remembers what never failed")
	}
	now = now.Add(rememberMost + 1) // long after the last failure it is a first one again
	m.add(key(1), now, true)
	if m.has(key(1), now.Add(rememberFirst)) {
		t.Error("remembers how long it was for, long after")
	}
	// Impatient dialers' failures make it no longer, and no shorter.
	for range 3 {
		m.add(key(3), now, false)
		now = now.Add(rememberFirst)
		if m.has(key(3), now) {
			t.Error("remembers an impatient dialer's failures for longer each time")
		}
	}
	for _, span := range []time.Duration{rememberFirst, 0, 2 * rememberFirst, 0, 4 * rememberFirst} {
		m.add(key(3), now, span != 0)
		span = max(span, rememberFirst)
		if now = now.Add(span); !m.has(key(3), now.Add(-1)) || m.has(key(3), now) {
			t.Errorf("does not remember for %v", span)
		}
	}
	m.add(key(1), now, true)
	m.forget(key(1))
	if m.has(key(1), now) {
		t.Error("remembers what it was told to forget")
	}
}

func TestMemoryIsBounded(t *testing.T) {
	var m memory
	start := time.Now()
	for i := range 3 * rememberMax {
		m.add(key(i), start, true)
		if len(m.failures) > rememberMax {
			t.Fatalf("%d entries after %d failures", len(m.failures), i+1)
		}
		if !m.has(key(i), start) {
			t.Fatalf("failure %d was not remembered", i)
		}
	}
}
