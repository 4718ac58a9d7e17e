package regcache

import (
	"math/rand/v2"
	"sync/atomic"
	"weak"
)

// How much memory is remembered: four times the regions that a budget has by default, in sets of
// four. With sets of one, one in 32 of 128 buffers used in turn would share its set with another,
// and neither would ever have come before.
const (
	seenBits = 10
	seenWays = 4
)

// seen remembers recently used memory, and counts its uses. It forgets by overwriting.
type seen struct {
	sets [1 << seenBits][seenWays]atomic.Pointer[counted]
}

// use is a use of memory for a cache. The allocator hands addresses out again, so on the heap
// it is the object that shows whether the memory is the same: a weak pointer to another one is
// never equal.
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

// find returns what counts u's uses, or nil and the place for it.
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

// note notes u, and returns how often that was done before, or what set has made of it. If it is
// not remembered, that is as often as before.
func (s *seen) note(u use, before int) int {
	c, place := s.find(u)
	if c == nil {
		c = &counted{use: u}
		c.times.Store(int64(before))
		place.Store(c)
	}
	return int(c.times.Add(1) - 1)
}

// set has u counted from times on.
func (s *seen) set(u use, times int64) {
	if c, _ := s.find(u); c != nil {
		c.times.Store(times)
	}
}
