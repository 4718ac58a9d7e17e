package regcache

import (
	"sync/atomic"
	"time"
)

// Stats is what a cache has done since it was made, and what it holds now; or
// the sum of that over the caches of a Budget, those included that were closed.
type Stats struct {
	Hits     uint64 // found registered, valid, and with the rights needed
	Misses   uint64 // not found so; what is exposed to a peer is not looked up
	Merges   uint64 // registrations that took the place of older, overlapping ones
	Promoted uint64 // registrations put into the cache

	// Registrations for one use: Once for memory that was seen for the first
	// time, Full because the cache had no room, Exposed for a peer.
	Once, Full, Exposed uint64

	Unknown          uint64 // ErrUnknownMemory returned: the provider copied
	Refused          uint64 // ENOBUFS returned: the device takes no more
	Failed           uint64 // registrations that failed for another reason
	Flushes          uint64 // the device was out of memory: all unused given back
	Evictions        uint64 // taken out to make room, flushes included
	DeregisterFailed uint64 // the device refused; the registration is forgotten

	// Registrations that ended because the memory did.
	Invalidated map[Cause]uint64

	Registrations   uint64 // calls of the device
	Deregistrations uint64
	RegisterTime    time.Duration
	DeregisterTime  time.Duration

	Entries   int   // regions in the cache
	Bytes     int64 // their size, in whole pages, as RLIMIT_MEMLOCK counts
	IdleBytes int64 // of those that are not in use now
	// All that is registered now: in the cache, in use or not, and beside it.
	PinnedEntries int64
	PinnedBytes   int64
}

// A Cause is why a registration was no longer valid.
type Cause uint8

const (
	ObjectDied     Cause = iota // the garbage collector freed it
	RangeWithdrawn              // its owner withdrew the declaration
	MappingChanged              // the kernel reported munmap, mremap or madvise
	CacheClosed
	causes
)

func (c Cause) String() string {
	return [...]string{"object died", "range withdrawn", "mapping changed", "cache closed"}[c]
}

// cause returns why a proof of this kind ends.
func (k Kind) cause() Cause {
	switch k {
	case Declared:
		return RangeWithdrawn
	case Watched:
		return MappingChanged
	}
	return ObjectDied
}

// counters are a cache's statistics. Hits are counted in the regions, so that
// different buffers do not share a counter's cache line.
type counters struct {
	hits                                       atomic.Uint64 // of regions that have left
	misses, merges, promoted                   atomic.Uint64
	once, full, exposed                        atomic.Uint64
	unknown, refused, failed, flushes          atomic.Uint64
	evictions, deregisterFailed                atomic.Uint64
	invalidated                                [causes]atomic.Uint64
	registrations, deregistrations             atomic.Uint64
	registerNanoseconds, deregisterNanoseconds atomic.Int64
	pinnedEntries, pinnedBytes                 atomic.Int64
}

// Stats returns the cache's statistics. It may be called at any time.
func (c *Cache) Stats() Stats {
	c.budget.mu.Lock()
	defer c.budget.mu.Unlock()
	s := c.totalsLocked()
	for _, r := range c.budget.order {
		if r.cache == c {
			s.Hits += r.hits.Load()
			s.IdleBytes += r.idleSize()
		}
	}
	return s
}

// Stats returns the statistics of all caches that share the budget: with
// DefaultBudget, those of the process.
func (b *Budget) Stats() Stats {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := Stats{Invalidated: make(map[Cause]uint64)}
	s.add(&b.past)
	for c := range b.caches {
		t := c.totalsLocked()
		s.add(&t)
	}
	for _, r := range b.order {
		s.Hits += r.hits.Load()
		s.IdleBytes += r.idleSize()
	}
	return s
}

// idleSize is what evicting the region, which is in the cache, would give back.
func (r *Region) idleSize() int64 {
	if r.refs.Load() > 1 {
		return 0
	}
	return r.size()
}

// totalsLocked returns the statistics without the hits of regions that are in the cache.
// budget.mu is held.
func (c *Cache) totalsLocked() Stats {
	n := &c.stats
	s := Stats{
		Hits:             n.hits.Load(),
		Misses:           n.misses.Load(),
		Merges:           n.merges.Load(),
		Promoted:         n.promoted.Load(),
		Once:             n.once.Load(),
		Full:             n.full.Load(),
		Exposed:          n.exposed.Load(),
		Unknown:          n.unknown.Load(),
		Refused:          n.refused.Load(),
		Failed:           n.failed.Load(),
		Flushes:          n.flushes.Load(),
		Evictions:        n.evictions.Load(),
		DeregisterFailed: n.deregisterFailed.Load(),
		Invalidated:      make(map[Cause]uint64),
		Registrations:    n.registrations.Load(),
		Deregistrations:  n.deregistrations.Load(),
		RegisterTime:     time.Duration(n.registerNanoseconds.Load()),
		DeregisterTime:   time.Duration(n.deregisterNanoseconds.Load()),
		Entries:          c.entries,
		Bytes:            c.bytes,
		PinnedEntries:    n.pinnedEntries.Load(),
		PinnedBytes:      n.pinnedBytes.Load(),
	}
	for cause := range causes {
		if count := n.invalidated[cause].Load(); count != 0 {
			s.Invalidated[cause] = count
		}
	}
	return s
}

func (s *Stats) add(t *Stats) {
	s.Hits += t.Hits
	s.Misses += t.Misses
	s.Merges += t.Merges
	s.Promoted += t.Promoted
	s.Once += t.Once
	s.Full += t.Full
	s.Exposed += t.Exposed
	s.Unknown += t.Unknown
	s.Refused += t.Refused
	s.Failed += t.Failed
	s.Flushes += t.Flushes
	s.Evictions += t.Evictions
	s.DeregisterFailed += t.DeregisterFailed
	for cause, count := range t.Invalidated {
		s.Invalidated[cause] += count
	}
	s.Registrations += t.Registrations
	s.Deregistrations += t.Deregistrations
	s.RegisterTime += t.RegisterTime
	s.DeregisterTime += t.DeregisterTime
	s.Entries += t.Entries
	s.Bytes += t.Bytes
	s.PinnedEntries += t.PinnedEntries
	s.PinnedBytes += t.PinnedBytes
}
