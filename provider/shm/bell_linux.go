package shm

import (
	"math/bits"
	"sync/atomic"

	"github.com/sanconn/san/session"
)

// set notes news for a slot and says whether the waiter has to be woken. Bits
// before sum, sum before asleep: the waiter clears in the opposite order and
// looks again after it said that it sleeps.
func (b *bell) set(slot int, ev session.Events) (wake bool) {
	word := slot / 32
	b.bits[word].Or(uint64(ev) << (slot % 32 * 2))
	b.sum[word/64].Or(1 << (word % 64))
	return b.asleep.Load() != 0 && b.asleep.Swap(0) != 0
}

// pending says whether there is any news. The peer can write the bell: at
// worst there is none behind it.
func (b *bell) pending() bool {
	for i := range b.sum {
		if b.sum[i].Load() != 0 {
			return true
		}
	}
	return false
}

// take hands all news out and clears them. The numbers come from local
// indexes, so the peer cannot name a slot that is not there.
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
