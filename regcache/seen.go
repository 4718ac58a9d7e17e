package regcache

import "sync/atomic"

// seenSlots is how many addresses are remembered, less those that collide.
const seenSlots = 4096

// seen remembers addresses that were used lately, so that the second use can
// be told from the first. It forgets by being overwritten, and a new object at
// an old one's address counts as seen: it decides what is worth caching, not
// what is right.
type seen struct {
	slots [seenSlots]atomic.Uintptr
}

// before reports whether address was noted before, and notes it.
func (s *seen) before(address uintptr) bool {
	const golden = 0x9e3779b97f4a7c15 // 2⁶⁴ over the golden ratio: Fibonacci hashing
	slot := &s.slots[uint64(address)*golden>>(64-12)]
	return slot.Swap(address) == address
}
