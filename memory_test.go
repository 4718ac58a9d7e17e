package san

import (
	"net/netip"
	"testing"
	"time"
)

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

// Two silent ports of a host stand for all of them until one answers. On loopback they do
// not: there, single processes are silent.
func TestMemoryOfAHost(t *testing.T) {
	at := func(host string, port uint16) attemptKey {
		return attemptKey{provider: "verbs", dst: netip.AddrPortFrom(netip.MustParseAddr(host), port)}
	}
	now := time.Now()
	for _, tt := range []struct {
		host string
		all  bool
	}{{"192.0.2.1", true}, {"2001:db8::1", true}, {"127.0.0.1", false}, {"::1", false}} {
		var m memory
		m.add(at(tt.host, 1), now, true)
		if m.has(at(tt.host, 3), now) {
			t.Errorf("%s: one port stands for another", tt.host)
		}
		m.add(at(tt.host, 2), now, true)
		if m.has(at(tt.host, 3), now) != tt.all {
			t.Errorf("%s: two ports stand for a third: want %v", tt.host, tt.all)
		}
		if m.has(at("192.0.2.2", 3), now) {
			t.Errorf("%s stands for another host", tt.host)
		}
		shm := at(tt.host, 3)
		if shm.provider = "shm"; m.has(shm, now) {
			t.Errorf("%s: one provider stands for another", tt.host)
		}
		m.forget(at(tt.host, 3))
		if m.has(at(tt.host, 3), now) || !m.has(at(tt.host, 1), now) || !m.has(at(tt.host, 2), now) {
			t.Errorf("%s: after an answer of one port, those that are silent should be, and no other", tt.host)
		}
		m.add(at(tt.host, 4), now, true) // and silent again
		if m.has(at(tt.host, 3), now) {
			t.Errorf("%s: a port that was silent before the answer counts", tt.host)
		}
		m.add(at(tt.host, 5), now, true)
		if m.has(at(tt.host, 3), now) != tt.all || m.has(at(tt.host, 3), now.Add(rememberFirst)) {
			t.Errorf("%s: two that are silent since: want %v, and not for longer", tt.host, tt.all)
		}
	}
}
