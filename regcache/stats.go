package regcache

import (
	"maps"
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
	s := Stats{Invalidated: make(map[Cause]uint64)}
	s.addLocked(c)
	for _, r := range c.budget.order {
		if r.cache == c {
			s.addCached(r)
		}
	}
	return s
}

// Stats returns the statistics of all caches that share the budget: with
// DefaultBudget, those of the process.
func (b *Budget) Stats() Stats {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.past
	s.Invalidated = maps.Clone(s.Invalidated)
	for c := range b.caches {
		s.addLocked(c)
	}
	for _, r := range b.order {
		s.addCached(r)
	}
	return s
}

// addCached adds what is counted in a region that is in its cache.
func (s *Stats) addCached(r *Region) {
	s.Hits += r.hits.Load()
	if r.refs.Load() <= 1 { // the cache's own
		s.IdleBytes += r.size()
	}
}

// addLocked adds what is counted in a cache, beside its regions. budget.mu is held.
func (s *Stats) addLocked(c *Cache) {
	n := &c.stats
	s.Hits += n.hits.Load()
	s.Misses += n.misses.Load()
	s.Merges += n.merges.Load()
	s.Promoted += n.promoted.Load()
	s.Once += n.once.Load()
	s.Full += n.full.Load()
	s.Exposed += n.exposed.Load()
	s.Unknown += n.unknown.Load()
	s.Refused += n.refused.Load()
	s.Failed += n.failed.Load()
	s.Flushes += n.flushes.Load()
	s.Evictions += n.evictions.Load()
	s.DeregisterFailed += n.deregisterFailed.Load()
	s.Registrations += n.registrations.Load()
	s.Deregistrations += n.deregistrations.Load()
	s.RegisterTime += time.Duration(n.registerNanoseconds.Load())
	s.DeregisterTime += time.Duration(n.deregisterNanoseconds.Load())
	s.Entries += c.entries
	s.Bytes += c.bytes
	s.PinnedEntries += n.pinnedEntries.Load()
	s.PinnedBytes += n.pinnedBytes.Load()
	for cause := range causes {
		if count := n.invalidated[cause].Load(); count != 0 {
			s.Invalidated[cause] += count
		}
	}
}
