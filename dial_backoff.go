package san

import (
	"net/netip"
	"sync"
	"time"
)

const (
	// backoffFirst is how long a destination that did not answer over a SAN is not tried
	// again at first: short, since its process may just have been busy. Each further
	// failure doubles it, up to backoffMost: long enough that the delay of an attempt is
	// rare, short enough that a repaired SAN is found again.
	backoffFirst = 2 * time.Second
	backoffMost  = 64 * time.Second

	// maxBackoffs bounds the number of destinations. With more dead ones than this,
	// dialers wait for some of them each time.
	maxBackoffs = 1024

	// minSilence is the shortest wait that proves anything about the destination. A
	// shorter one costs dialers little, even each time.
	minSilence = 100 * time.Millisecond
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

// backoff has the destinations that did not answer lately. The zero value is empty.
type backoff struct {
	mu     sync.Mutex
	silent map[attemptKey]silence // guarded by mu
}

type silence struct {
	until time.Time     // the destination is not tried again before
	span  time.Duration // how long it was left alone the last time
}

// dialBackoff is shared by all dialers of the process.
var dialBackoff backoff

// timedOut records that an attempt had no answer. whole means that it had all its time;
// only such an attempt makes the span longer.
func (b *backoff) timedOut(k attemptKey, now time.Time, whole bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.silent == nil {
		b.silent = make(map[attemptKey]silence)
	}
	last, again := b.silent[k]
	switch {
	case now.Before(last.until):
		return // concurrent dials count as one failure
	case !again && len(b.silent) >= maxBackoffs:
		b.makeRoomLocked(now)
	}
	if now.Sub(last.until) > backoffMost {
		last.span = 0 // long ago
	}
	if !whole {
		b.silent[k] = silence{until: now.Add(backoffFirst), span: last.span}
		return
	}
	span := min(max(2*last.span, backoffFirst), backoffMost)
	b.silent[k] = silence{until: now.Add(span), span: span}
}

// makeRoomLocked drops destinations that may be tried again, and some others if need be.
// mu must be held.
func (b *backoff) makeRoomLocked(now time.Time) {
	for k, s := range b.silent {
		if !now.Before(s.until) {
			delete(b.silent, k)
		}
	}
	for k := range b.silent {
		if len(b.silent) < maxBackoffs {
			return
		}
		delete(b.silent, k)
	}
}

// left returns for how much longer the destination is not to be tried; 0 or less: it may
// be tried.
func (b *backoff) left(k attemptKey, now time.Time) time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.silent[k].until.Sub(now)
}

// answered records that the destination has answered.
func (b *backoff) answered(k attemptKey) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.silent, k)
}
