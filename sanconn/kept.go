package sanconn

import (
	"runtime"
	"sync/atomic"
)

// keptOfAll is how many bytes connections hold that have left sessions as a Write starved, and that
// nobody has read: up to mostOfRing each. They lay in the peers' memory, and no other budget has them,
// so many such connections at once would take all that a small container has.
var keptOfAll atomic.Int64

// takeRoomLocked takes room for what a session has that the connection leaves because a Write starves:
// one may always, others as long as all have no more than most. mu is held.
func (c *Conn) takeRoomLocked(most int64) bool {
	for {
		n := keptOfAll.Load()
		if n > 0 && n+mostOfRing > most {
			return false
		}
		if keptOfAll.CompareAndSwap(n, n+mostOfRing) {
			break
		}
	}
	if c.past == nil {
		c.past = new(past)
	}
	if c.past.kept == nil {
		c.past.kept = new(atomic.Int64)
		runtime.AddCleanup(c, giveRoomBack, c.past.kept) // of a connection that the program forgets
	}
	c.past.kept.Add(mostOfRing)
	return true
}

func giveRoomBack(kept *atomic.Int64) { keptOfAll.Add(-kept.Swap(0)) }

// countKeptLocked has what the connection holds of such a session count, and no more. mu is held.
func (c *Conn) countKeptLocked() {
	if c.past == nil || c.past.kept == nil || c.past.kept.Load() == 0 ||
		c.state.phase == leaving { // at whose end it is called again
		return
	}
	n := int64(len(c.in.front))
	if c.in.rest != nil {
		n += int64(len(c.in.rest.bytes))
	}
	if c.closed.Load() {
		n = 0
	}
	keptOfAll.Add(n - c.past.kept.Swap(n))
}
