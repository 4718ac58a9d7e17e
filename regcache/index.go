package regcache

import (
	"slices"
	"sync/atomic"
)

const (
	// A region is in the bucket of every granule that it touches; a look-up searches
	// that of its first byte. A granule holds a handful of regions of useful sizes.
	granuleShift = 20
	// 256 pointers are 2 KiB: small enough for a cache per connection.
	indexBuckets = 256
)

// index finds the region that covers an address range. A look-up takes no lock and writes nothing, so
// it scales with cores. A change copies the buckets concerned. Methods whose names end in Locked need
// Budget.mu.
//
// The regions in an index are disjoint.
type index struct {
	buckets [indexBuckets]bucket
}

type bucket struct{ sorted atomic.Pointer[[]entry] } // by start; nil: empty

func (b *bucket) entries() []entry {
	if p := b.sorted.Load(); p != nil {
		return *p
	}
	return nil
}

// entry has a copy of a region's bounds, so that a look-up reads one array only.
type entry struct {
	start, end uintptr
	region     *Region
}

func bucketOf(granule uintptr) uintptr {
	// Neighbouring granules go to neighbouring buckets; the upper bits are
	// folded in, as Go's arenas and large maps are aligned far above 256 MiB.
	return (granule ^ granule>>8 ^ granule>>16) % indexBuckets
}

// find returns the region that covers all of [start, end), or nil.
func (x *index) find(start, end uintptr) *Region {
	entries := x.buckets[bucketOf(start>>granuleShift)].entries()
	lo, hi := 0, len(entries)
	for lo < hi { // find the last entry that starts at or before start
		mid := int(uint(lo+hi) >> 1)
		if entries[mid].start <= start {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	if lo == 0 || entries[lo-1].end < end {
		return nil
	}
	return entries[lo-1].region
}

// overlappingLocked returns the regions that share a byte with [start, end).
func (x *index) overlappingLocked(start, end uintptr) []*Region {
	var found []*Region
	x.eachBucket(start, end, func(b *bucket) {
		for _, s := range b.entries() {
			if s.start < end && start < s.end && !slices.Contains(found, s.region) {
				found = append(found, s.region)
			}
		}
	})
	return found
}

func (x *index) insertLocked(r *Region) {
	x.eachBucket(r.start, r.end, func(b *bucket) {
		old := b.entries()
		at := 0
		for at < len(old) && old[at].start < r.start {
			at++
		}
		entries := slices.Concat(old[:at], []entry{{r.start, r.end, r}}, old[at:])
		b.sorted.Store(&entries)
	})
}

func (x *index) removeLocked(r *Region) {
	x.eachBucket(r.start, r.end, func(b *bucket) {
		entries := slices.DeleteFunc(slices.Clone(b.entries()), func(s entry) bool { return s.region == r })
		if len(entries) == 0 {
			b.sorted.Store(nil)
			return
		}
		b.sorted.Store(&entries)
	})
}

// eachBucket calls f once for each bucket that [start, end) falls into.
func (x *index) eachBucket(start, end uintptr, f func(*bucket)) {
	var seen [indexBuckets]bool
	first, last := start>>granuleShift, (end-1)>>granuleShift
	for g, n := first, 0; g <= last && n < indexBuckets; g++ {
		if b := bucketOf(g); !seen[b] {
			seen[b] = true
			n++
			f(&x.buckets[b])
		}
	}
}
