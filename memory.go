package san

import (
	"math"
	"net/netip"
	"sync"
	"time"
)

const (
	// rememberFirst is how long a destination that did not answer over a SAN
	// is left alone at first: a process that had no processor for a moment is
	// soon asked again. Each further failure doubles it, up to rememberMost:
	// long enough that the delay of an attempt is rare, short enough that a
	// repaired SAN is found again.
	rememberFirst = 2 * time.Second
	rememberMost  = 64 * time.Second
	// rememberMax bounds the memory. Dialers to more dead destinations than
	// this wait for some of them again.
	rememberMax = 1024
	// silence is the least wait that says something about the destination; a shorter
	// one costs a dialer little each time.
	silence = 100 * time.Millisecond
	// silentPorts of another host that did not answer stand for all of its ports: on the
	// way there packets are dropped. One may be that of a process that is stopped.
	silentPorts = 2
)

// attemptKey names a provider's way to a destination: what would be the same
// attempt by another dialer.
type attemptKey struct {
	provider string
	dst      netip.AddrPort
	from     netip.Addr // the dialer's choice, if it has one
	rdma     RDMA
}

func keyOf(p provider, r request) attemptKey {
	k := attemptKey{provider: p.name(), dst: r.remote, rdma: r.rdma}
	if r.local != nil {
		k.from, _ = netip.AddrFromSlice(r.local.IP)
	}
	return k
}

// host is the key for all ports of the destination.
func (k attemptKey) host() attemptKey {
	k.dst = netip.AddrPortFrom(k.dst.Addr(), 0)
	return k
}

// memory holds the attempts that failed by a time-out lately. The zero value
// is empty.
type memory struct {
	mu       sync.Mutex
	failures map[attemptKey]failure // guarded by mu
}

type failure struct {
	until time.Time
	span  time.Duration
	alone bool // another port of the host has answered since
}

// remembered is shared by all dialers of the process.
var remembered memory

// add notes a failure, of one that had all its time or not: only that makes the span
// longer.
func (m *memory) add(k attemptKey, now time.Time, whole bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.failures == nil {
		m.failures = make(map[attemptKey]failure)
	}
	last, again := m.failures[k]
	switch {
	case now.Before(last.until):
		return // dials that ran side by side have failed once
	case !again && len(m.failures) >= rememberMax:
		m.makeRoom(now)
	}
	if now.Sub(last.until) > rememberMost {
		last.span = 0 // long ago
	}
	if !whole {
		m.failures[k] = failure{until: now.Add(rememberFirst), span: last.span}
		return
	}
	span := min(max(2*last.span, rememberFirst), rememberMost)
	m.failures[k] = failure{until: now.Add(span), span: span}
}

// makeRoom drops what is over, and some of the rest if need be. Called with mu
// held.
func (m *memory) makeRoom(now time.Time) {
	for k, f := range m.failures {
		if !now.Before(f.until) {
			delete(m.failures, k)
		}
	}
	for k := range m.failures {
		if len(m.failures) < rememberMax {
			return
		}
		delete(m.failures, k)
	}
}

// has: the destination did not answer lately, or ports of its host did not.
func (m *memory) has(k attemptKey, now time.Time) bool { return m.until(k, now) > 0 }

// until is how long the destination is left alone yet.
func (m *memory) until(k attemptKey, now time.Time) time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	if left := m.failures[k].until.Sub(now); left > 0 {
		return left
	}
	silent, until := 0, time.Duration(math.MaxInt64)
	if !k.dst.Addr().IsLoopback() { // where processes alone can be silent
		for other, f := range m.failures {
			if !f.alone && now.Before(f.until) && other.host() == k.host() {
				silent++
				until = min(until, f.until.Sub(now))
			}
		}
	}
	if silent < silentPorts {
		return 0
	}
	return until
}

// forget: the destination has answered.
func (m *memory) forget(k attemptKey) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.failures, k)
	for other, f := range m.failures {
		if other.host() == k.host() {
			f.alone = true
			m.failures[other] = f
		}
	}
}
