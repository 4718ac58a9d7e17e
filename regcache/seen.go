package regcache

import (
	"math/rand/v2"
	"sync/atomic"
	"weak"
)

// How much memory is remembered: four times as much as the default budget has regions, in sets of four.
// With sets of one, one in 32 of 128 buffers used in turn would share its set with another, and neither
// would ever be found.
const (
	seenBits = 10
	seenWays = 4
)

// seen remembers recently used memory, and counts its uses. New entries overwrite old ones.
type seen struct {
	sets [1 << seenBits][seenWays]atomic.Pointer[counted]
}

// use is a use of memory for a cache. The allocator reuses addresses, so on the heap the object shows
// whether the memory is the same: a weak pointer to another object is never equal.
type use struct {
	address, cache uintptr
	object         weak.Pointer[byte] // zero: not on the heap
}

type counted struct {
	use
	times atomic.Int64
}

func setOf(u use) uint64 {
	const golden = 0x9e3779b97f4a7c15 // 2⁶⁴ over the golden ratio: Fibonacci hashing
	return uint64(u.address^u.cache) * golden >> (64 - seenBits)
}

// find returns the count of u's uses, or nil and the place for it.
func (s *seen) find(u use) (*counted, *atomic.Pointer[counted]) {
	set := &s.sets[setOf(u)]
	place := &set[rand.IntN(seenWays)]
	for i := range set {
		if c := set[i].Load(); c == nil {
			place = &set[i]
		} else if c.use == u {
			return c, nil
		}
	}
	return nil, place
}

// note counts a use of u, and returns how often u was used before, or the number from set. If u is not
// remembered, it counts from before.
func (s *seen) note(u use, before int) int {
	c, place := s.find(u)
	if c == nil {
		c = &counted{use: u}
		c.times.Store(int64(before))
		place.Store(c)
	}
	return int(c.times.Add(1) - 1)
}

// set makes the count of u go on from times.
func (s *seen) set(u use, times int64) {
	if c, _ := s.find(u); c != nil {
		c.times.Store(times)
	}
}
