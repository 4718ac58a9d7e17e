package sanconn

import (
	"runtime"
	"sync/atomic"
)

// keptOfAll is how many unread bytes are held by connections that have left sessions because a Write
// starved: up to mostOfRing each. They were in the peers' memory before, and count in no other budget,
// so many such connections at once would use up a small container.
var keptOfAll atomic.Int64

// takeRoomLocked takes room for what may be unread on a session that the connection leaves because a
// Write starves, and reports whether there is room. One connection may always have it, further ones as
// long as all together have at most most. mu is held.
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
		runtime.AddCleanup(c, giveRoomBack, c.past.kept) // when the connection is collected
	}
	c.past.kept.Add(mostOfRing)
	return true
}

func giveRoomBack(kept *atomic.Int64) { keptOfAll.Add(-kept.Swap(0)) }

// countKeptLocked makes the connection count for exactly what it holds of such a session. mu is held.
func (c *Conn) countKeptLocked() {
	if c.past == nil || c.past.kept == nil || c.past.kept.Load() == 0 ||
		c.state.phase == leaving { // the end of leaving calls countKeptLocked again
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
