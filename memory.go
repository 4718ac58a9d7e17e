package san

import (
	"net/netip"
	"sync"
	"time"
)

const (
	// rememberFirst is how long a destination that did not answer over a SAN is not
	// tried again at first: short, since its process may just have been busy. Each
	// further failure doubles it, up to rememberMost: long enough that the delay of
	// an attempt is rare, short enough that a repaired SAN is found again.
	rememberFirst = 2 * time.Second
	rememberMost  = 64 * time.Second
	// rememberMax bounds the memory. With more dead destinations than this, dialers
	// wait for some of them each time.
	rememberMax = 1024
	// silence is the shortest wait that proves anything about the destination. A
	// shorter one costs dialers little, even each time.
	silence = 100 * time.Millisecond
)

// attemptKey identifies an attempt: dialers with equal keys would make the same one.
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

// memory holds the attempts that recently timed out. The zero value is empty.
type memory struct {
	mu       sync.Mutex
	failures map[attemptKey]failure // guarded by mu
}

type failure struct {
	until time.Time
	span  time.Duration
}

// remembered is shared by all dialers of the process.
var remembered memory

// add records a failure. whole says that the attempt had all its time; only such a failure
// makes the span longer.
func (m *memory) add(k attemptKey, now time.Time, whole bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.failures == nil {
		m.failures = make(map[attemptKey]failure)
	}
	last, again := m.failures[k]
	switch {
	case now.Before(last.until):
		return // concurrent dials count as one failure
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

// makeRoom drops failures that are over, and some others if need be. mu is held.
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

// until returns for how much longer the destination is not to be tried; 0 or less: it may be.
func (m *memory) until(k attemptKey, now time.Time) time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.failures[k].until.Sub(now)
}

// forget records that the destination has answered.
func (m *memory) forget(k attemptKey) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.failures, k)
}
