package ring

import "sync/atomic"

// Alarm is how a process has the other one wake it: a word that the one sets, and the other only
// reads. It is another each time, so the other end remembers, in memory of its own, for which it
// has rung.
//
// No wake-up is lost if the one sets it before its last look at what it waits for, and the other
// looks at it behind what it has done: all of that is sequentially consistent.
type Alarm struct{ word atomic.Uint64 }

// The low half of the word is a place in units of 4 bytes, modulo 2³², with bit 0 for set, as
// places are multiples of 8. The high half counts how often it has been set.
const alarmSet = 1

// Set asks for one wake-up, once the other side has come to a place, which is at most a few
// laps from where it is.
func (a *Alarm) Set(place uint64) {
	low := uint64(uint32(place/4)) | alarmSet
	for {
		old := a.word.Load()
		if a.word.CompareAndSwap(old, (old>>32+1)<<32|low) {
			return
		}
	}
}

// clear takes that back, or makes it ready for another to set. It counts on, as there may be one
// that has rung for what it was.
func (a *Alarm) clear() {
	if a.isSet() {
		a.word.And(^uint64(alarmSet))
	}
}

// isSet reports whether there was no clear behind the last Set. The other side may have rung.
func (a *Alarm) isSet() bool { return a.word.Load()&alarmSet != 0 }

// Rung is what the other side knows of an Alarm: for which it has rung last.
type Rung struct{ last atomic.Uint64 }

// waits reports whether an alarm is set for which it has not rung.
func (r *Rung) waits(a *Alarm) bool {
	w := a.word.Load()
	return w&alarmSet != 0 && w != r.last.Load()
}

// Ring reports whether it has to ring now, wherever it is.
func (r *Rung) Ring(a *Alarm) bool {
	w := a.word.Load()
	return w&alarmSet != 0 && w != r.last.Load() && r.last.Swap(w) != w
}

// ringAt reports whether it has to ring now, that it has come to a place.
func (r *Rung) ringAt(a *Alarm, place uint64) bool {
	w := a.word.Load()
	return w&alarmSet != 0 && int32(uint32(place/4)-uint32(w&^alarmSet)) >= 0 &&
		w != r.last.Load() && r.last.Swap(w) != w
}
