package shm

import (
	"sync/atomic"

	"github.com/sanconn/san/session"
)

// tell counts news about a slot, which the other side then finds: first in the slot's count, then in
// its group's. After tell its caller looks whether the other side sleeps. That side goes the opposite
// way: it sets its alarm, and then reads the groups' counts, and the slots' after those.
func (b *bell) tell(slot int, ev session.Events) {
	b.slots[slot].Add(uint64(ev&session.RecvReady)*oneRecv + uint64(ev&session.SendReady)/uint64(session.SendReady)*oneSend)
	b.groups[slot/groupSlots].Add(1)
}

// One piece of news about a slot, in its word.
const (
	oneRecv = 1
	oneSend = 1 << 32
)

// seenCounts are the counts of the other side's bell that this side has seen. One goroutine at a time
// uses them.
type seenCounts struct {
	most   atomic.Int32 // the number of slots
	groups [linkSlots / groupSlots]uint32
	slots  []uint64
}

// pending reports whether there is news. Nonsense that a peer writes causes at worst a look in vain.
func (c *seenCounts) pending(b *bell) bool {
	for i := range c.some() {
		if b.groups[i].Load() != c.groups[i] {
			return true
		}
	}
	return false
}

// some returns the number of groups in use.
func (c *seenCounts) some() int { return (int(c.most.Load()) + groupSlots - 1) / groupSlots }

// collect calls deliver for each slot with news.
func (c *seenCounts) collect(b *bell, deliver func(slot int, ev session.Events)) {
	for i := range c.some() {
		n := b.groups[i].Load()
		if n == c.groups[i] {
			continue
		}
		c.groups[i] = n
		if have := (i + 1) * groupSlots; have > len(c.slots) {
			c.slots = append(c.slots, make([]uint64, have-len(c.slots))...)
		}
		for slot := i * groupSlots; slot < (i+1)*groupSlots; slot++ {
			news := b.slots[slot].Load()
			if old := c.slots[slot]; news != old {
				c.slots[slot] = news
				deliver(slot, eventsOf(old, news))
			}
		}
	}
}

func eventsOf(old, news uint64) (ev session.Events) {
	if uint32(old) != uint32(news) {
		ev |= session.RecvReady
	}
	if old>>32 != news>>32 {
		ev |= session.SendReady
	}
	return ev
}
