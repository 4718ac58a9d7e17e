package shm

import (
	"sync/atomic"

	"github.com/sanconn/san/session"
)

// tell notes news of a slot, for the other side to see. The order is slot, group, and then
// whether it waits; that side goes the other way, and looks again after it has set its alarm.
func (b *bell) tell(slot int, ev session.Events) {
	b.slots[slot].Add(uint64(ev&session.RecvReady)*oneRecv + uint64(ev&session.SendReady)/uint64(session.SendReady)*oneSend)
	b.groups[slot/groupSlots].Add(1)
}

// A slot's news, in one word.
const (
	oneRecv = 1
	oneSend = 1 << 32
)

// seenCounts are what one has seen of the other side's bell. One goroutine at a time looks.
type seenCounts struct {
	most   atomic.Int32 // slots that there are
	groups [linkSlots / groupSlots]uint32
	slots  []uint64
}

// pending reports whether there is any news. A peer that writes nonsense causes at worst
// a look for nothing.
func (c *seenCounts) pending(b *bell) bool {
	for i := range c.some() {
		if b.groups[i].Load() != c.groups[i] {
			return true
		}
	}
	return false
}

// some is how many groups there are.
func (c *seenCounts) some() int { return (int(c.most.Load()) + groupSlots - 1) / groupSlots }

// collect hands what is news to deliver.
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
