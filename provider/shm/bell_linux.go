package shm

import (
	"sync/atomic"

	"github.com/sanconn/san/session"
)

// tell notes news of a slot, for the other side to hear. The order is slot, group, and then
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

// heard is what one has heard of the other side's bell. One goroutine at a time hears.
type heard struct {
	most   atomic.Int32 // slots that there are
	groups [linkSlots / groupSlots]uint32
	slots  []uint64
}

// pending reports whether there is any news. A peer that writes nonsense causes at worst
// a look for nothing.
func (h *heard) pending(b *bell) bool {
	for i := range h.some() {
		if b.groups[i].Load() != h.groups[i] {
			return true
		}
	}
	return false
}

// some is how many groups there are.
func (h *heard) some() int { return (int(h.most.Load()) + groupSlots - 1) / groupSlots }

// take hands what is news to deliver.
func (h *heard) take(b *bell, deliver func(slot int, ev session.Events)) {
	for i := range h.some() {
		n := b.groups[i].Load()
		if n == h.groups[i] {
			continue
		}
		h.groups[i] = n
		if have := (i + 1) * groupSlots; have > len(h.slots) {
			h.slots = append(h.slots, make([]uint64, have-len(h.slots))...)
		}
		for slot := i * groupSlots; slot < (i+1)*groupSlots; slot++ {
			news := b.slots[slot].Load()
			if old := h.slots[slot]; news != old {
				h.slots[slot] = news
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
