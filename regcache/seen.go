package regcache

import (
	"sync/atomic"
	"weak"
)

// How many addresses are remembered, fewer if some collide: four times the regions that a
// budget has by default.
const (
	seenBits  = 12
	seenSlots = 1 << seenBits
)

// seen remembers recently used memory, and counts its uses. It forgets by overwriting.
type seen struct {
	slots [seenSlots]atomic.Pointer[counted]
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

func (s *seen) slot(u use) *atomic.Pointer[counted] {
	const golden = 0x9e3779b97f4a7c15 // 2⁶⁴ over the golden ratio: Fibonacci hashing
	return &s.slots[uint64(u.address^u.cache)*golden>>(64-seenBits)]
}

// note notes u, and returns how often that was done before, or what set has made of it. If it is
// not remembered, that is as often as before.
func (s *seen) note(u use, before int) int {
	slot := s.slot(u)
	c := slot.Load()
	if c == nil || c.use != u {
		c = &counted{use: u}
		c.times.Store(int64(before))
		slot.Store(c)
	}
	return int(c.times.Add(1) - 1)
}

// set has u counted from times on.
func (s *seen) set(u use, times int64) {
	if c := s.slot(u).Load(); c != nil && c.use == u {
		c.times.Store(times)
	}
}
