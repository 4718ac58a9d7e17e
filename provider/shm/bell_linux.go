package shm

import (
	"math/bits"
	"sync/atomic"

	"github.com/sanconn/san/session"
)

// set records news for a slot and reports whether the waiter must be woken. The order is
// bits, sum, asleep: the waiter goes the other way, and looks again after it has set
// asleep.
func (b *bell) set(slot int, ev session.Events) (wake bool) {
	word := slot / 32
	b.bits[word].Or(uint64(ev) << (slot % 32 * 2))
	b.sum[word/64].Or(1 << (word % 64))
	return b.asleep.Load() != 0 && b.asleep.Swap(0) != 0
}

// pending reports whether there is any news. A peer that writes nonsense causes at worst
// a look for nothing.
func (b *bell) pending() bool {
	for i := range b.sum {
		if b.sum[i].Load() != 0 {
			return true
		}
	}
	return false
}

// take clears all news and hands them to deliver. Slot numbers come from local indexes
// below linkSlots; deliver ignores those that the link does not have.
func (b *bell) take(deliver func(slot int, ev session.Events)) {
	for i := range b.sum {
		for sum := takeWord(&b.sum[i]); sum != 0; sum &= sum - 1 {
			word := i*64 + bits.TrailingZeros64(sum)
			for news := takeWord(&b.bits[word]); news != 0; {
				at := bits.TrailingZeros64(news) &^ 1
				deliver(word*32+at/2, session.Events(news>>at)&3)
				news &^= 3 << at
			}
		}
	}
}

func takeWord(w *atomic.Uint64) uint64 {
	if w.Load() == 0 {
		return 0
	}
	return w.Swap(0)
}
