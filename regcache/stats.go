package regcache

import (
	"maps"
	"reflect"
	"time"
)

// Stats is what a cache has done since it was made, and what it has now; or the sum over the caches of
// a Budget, including those that were closed.
type Stats struct {
	Hits     uint64 // found registered, valid, and with the rights needed
	Misses   uint64 // not found so; memory that is exposed to a peer is not looked up
	Merges   uint64 // registrations that took the place of older, overlapping ones
	Promoted uint64 // registrations put into the cache

	// Registrations for one use: Once for memory that was seen for the first
	// time, Full because the cache had no room, Exposed for a peer.
	Once, Full, Exposed uint64

	Unknown          uint64 // ErrUnknownMemory was returned: the provider copied
	Refused          uint64 // ENOBUFS was returned: the device takes no more, or has refused this memory recently (then it was not tried)
	Failed           uint64 // registrations that failed for another reason
	Flushes          uint64 // the device was out of memory: everything unused was deregistered
	Evictions        uint64 // taken out to make room, including flushes
	DeregisterFailed uint64 // the device refused to deregister; the registration is forgotten

	// Regions taken out of the cache because they were no longer valid, or no longer of use.
	Invalidated map[Cause]uint64

	Registrations   uint64 // calls of the device
	Deregistrations uint64
	RegisterTime    time.Duration
	DeregisterTime  time.Duration

	Entries   int   // regions in the cache
	Bytes     int64 // their size, in whole pages, as RLIMIT_MEMLOCK counts
	IdleBytes int64 // of regions that are not in use now
	// Everything that is registered now: in the cache, in use or not, and outside it.
	PinnedEntries int64
	PinnedBytes   int64
}

// A Cause is why a registration was no longer valid, or no longer of use.
type Cause uint8

const (
	ObjectDied     Cause = iota // the garbage collector freed it
	RangeWithdrawn              // its owner withdrew the declaration
	MappingChanged              // the kernel reported munmap, mremap or madvise
	CacheClosed
	UsersLeft // all its users have left, one to two seconds before
)

func (c Cause) String() string {
	return [...]string{"object died", "range withdrawn", "mapping changed", "cache closed", "users left"}[c]
}

// cause returns why a region of this kind stops being valid.
func (k Kind) cause() Cause {
	switch k {
	case Declared:
		return RangeWithdrawn
	case Watched:
		return MappingChanged
	}
	return ObjectDied
}

// count changes a cache's statistics. Hits are counted in the regions, without a lock.
func (c *Cache) count(change func(*Stats)) {
	c.budget.mu.Lock()
	defer c.budget.mu.Unlock()
	change(&c.stats)
}

// Stats returns the cache's statistics. It may be called at any time.
func (c *Cache) Stats() Stats {
	c.budget.mu.Lock()
	defer c.budget.mu.Unlock()
	s := Stats{Invalidated: make(map[Cause]uint64)}
	s.add(&c.stats)
	for _, r := range c.budget.regionsLocked() {
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
		s.add(&c.stats)
	}
	for _, r := range b.regionsLocked() {
		s.addCached(r)
	}
	return s
}

// addCached adds the counts of a region that is in its cache.
func (s *Stats) addCached(r *Region) {
	s.Hits += r.hits.Load()
	if r.refs.Load() <= 1 { // only the cache's own reference
		s.IdleBytes += r.size()
	}
}

// add adds the statistics of a cache, all of which are sums, except the hits in its regions.
func (s *Stats) add(t *Stats) {
	sums, counts := reflect.ValueOf(s).Elem(), reflect.ValueOf(t).Elem()
	for i := range sums.NumField() {
		switch sum, n := sums.Field(i), counts.Field(i); {
		case n.CanUint():
			sum.SetUint(sum.Uint() + n.Uint())
		case n.CanInt():
			sum.SetInt(sum.Int() + n.Int())
		}
	}
	for cause, n := range t.Invalidated {
		s.Invalidated[cause] += n
	}
}
