package regcache

import "sync/atomic"

// How many addresses are remembered, fewer if some collide: four times the regions that a
// budget has by default.
const (
	seenBits  = 12
	seenSlots = 1 << seenBits
)

// seen remembers recently used addresses, to distinguish a second use from the first. It
// forgets by overwriting, and takes a new object at an old address for the old one. That
// is harmless: it decides only what is worth caching.
type seen struct {
	slots [seenSlots]atomic.Uintptr
}

// before reports whether address was noted before, and notes it.
func (s *seen) before(address uintptr) bool {
	const golden = 0x9e3779b97f4a7c15 // 2⁶⁴ over the golden ratio: Fibonacci hashing
	slot := &s.slots[uint64(address)*golden>>(64-seenBits)]
	return slot.Swap(address) == address
}
