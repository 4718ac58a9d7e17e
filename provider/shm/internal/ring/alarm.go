package ring

import "sync/atomic"

// Alarm is a word by which one process requests a wake-up from the other. The process that wants to be
// woken sets it; the other one only reads it. Each setting has a new value, and the reader remembers,
// in memory of its own, for which value it has rung.
//
// No wake-up is lost if the one process sets the alarm before its last look at what it waits for, and
// the other reads the alarm after it has published that. All these accesses are sequentially
// consistent.
type Alarm struct{ word atomic.Uint64 }

// The low half of the word is a place in units of 4 bytes, modulo 2³². Places are multiples of 8, so
// bit 0 is free: it is 1 while the alarm is set. The high half counts the settings.
const alarmSet = 1

// Set requests one wake-up when the other side has come to a place. The place is at most a few laps
// away from the other side's.
func (a *Alarm) Set(place uint64) {
	low := uint64(uint32(place/4)) | alarmSet
	for {
		old := a.word.Load()
		if a.word.CompareAndSwap(old, (old>>32+1)<<32|low) {
			return
		}
	}
}

// clear ends the request. The count of settings stays, as the other side may have rung for this one.
func (a *Alarm) clear() {
	if a.isSet() {
		a.word.And(^uint64(alarmSet))
	}
}

// isSet reports whether clear was not called since the last Set. The other side may have rung already.
func (a *Alarm) isSet() bool { return a.word.Load()&alarmSet != 0 }

// Rung is for which value of an Alarm this side has rung last.
type Rung struct{ last atomic.Uint64 }

// waits reports whether the alarm is set and this side has not rung for it.
func (r *Rung) waits(a *Alarm) bool {
	w := a.word.Load()
	return w&alarmSet != 0 && w != r.last.Load()
}

// Ring reports whether this side has to ring now, and notes that it does. The place does not matter.
func (r *Rung) Ring(a *Alarm) bool {
	w := a.word.Load()
	return w&alarmSet != 0 && w != r.last.Load() && r.last.Swap(w) != w
}

// ringAt is Ring if this side has come to the alarm's place, else false.
func (r *Rung) ringAt(a *Alarm, place uint64) bool {
	w := a.word.Load()
	return w&alarmSet != 0 && int32(uint32(place/4)-uint32(w&^alarmSet)) >= 0 &&
		w != r.last.Load() && r.last.Swap(w) != w
}
