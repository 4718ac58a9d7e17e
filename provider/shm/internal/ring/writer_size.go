package ring

import (
	"math/bits"
	"runtime"
	"sync/atomic"
)

// extent is how much of a ring its writer uses, and how much may have memory. What is above
// Start belongs to whoever has grabbed it.
type extent struct {
	budget Share
	max    uint64 // upper bound of limit

	limit    atomic.Uint64 // the sender raises it; Shrink lowers it under grab
	pages    atomic.Uint64 // likewise: how much of the ring may have memory, at least limit
	grab     atomic.Uint32 // needed once pages is above Start
	idleTail uint64        // Shrink's: out.tail when it last looked, or neverLooked
	starved  bool          // the budget last had nothing left on the way to Sure; the sender's
}

// Who uses a ring that has grown: nobody, the sender from Reserve to Commit (and for good
// after Stop), or Shrink while it gives pages back.
const (
	grabNobody = iota
	grabSender
	grabShrink
)

// neverLooked is not a valid position, so that Shrink's first look never finds a new ring
// idle: it may have inherited memory.
const neverLooked = ^uint64(0)

func (x *extent) init(most int, pages uint64, b Share) {
	x.budget, x.max = b, uint64(most)
	x.limit.Store(Start) // small, to stay in the cache, however many pages there are
	x.pages.Store(max(pages, Start))
	x.idleTail = neverLooked
}

// Pages is how much of the ring may have memory, in bytes. Beyond Start the budget counts
// it.
func (x *extent) Pages() uint64 { return x.pages.Load() }

// MayGrow reports whether the ring could grow to Sure now.
func (x *extent) MayGrow() bool {
	return x.pages.Load() >= min(Sure, x.max) || x.budget.HasSure()
}

// Starved reports whether a Reserve that has found no room would have some in a ring of Sure bytes,
// for which the budget has nothing left. It is one of the sender's methods.
func (x *extent) Starved() bool { return x.starved }

// tryGrab keeps Shrink from the ring until ungrab. It fails while Shrink is at work.
func (x *extent) tryGrab() bool {
	return x.grab.Load() == grabSender || x.grab.CompareAndSwap(grabNobody, grabSender)
}

func (x *extent) ungrab() {
	if x.grab.Load() == grabSender {
		x.grab.Store(grabNobody)
	}
}

// grow raises the limit to the next power of two, or to Sure, which stands for 512 KiB: between
// the two there is too little for leap, so a writer that had gone on at the start of the ring at
// 512 KiB would never get there. From Sure on it needs the budget's consent.
func (x *extent) grow(do *Action) bool {
	old, pages := x.limit.Load(), x.pages.Load()
	to := min(1<<bits.Len64(old), x.max)
	if old < Sure && to > Sure/2 {
		to = min(Sure, x.max)
	}
	if to <= old || !x.tryGrab() {
		return false
	}
	if to > pages {
		granted := x.budget.Take(int64(to-pages), old < Sure)
		if x.starved = !granted && old < Sure; !granted {
			return false
		}
		x.pages.Store(to)
		*do |= Grew
	}
	x.limit.Store(to)
	return true
}

// Stop keeps Shrink out for good, after waiting for one at work. Nothing is written any
// more.
func (x *extent) Stop() {
	for !x.tryGrab() {
		runtime.Gosched()
	}
}

// Shrink gives back the memory of a ring that has been empty since the last call, by
// calling punch with how much of it may have memory, which returns it to the budget. It
// reports whether it has to be called again, and whether a Reserve may have found no room
// only because Shrink was at work.
func (w *Writer) Shrink(punch func(pages uint64) bool) (again, met bool) {
	if w.pages.Load() <= Start {
		return false, false
	}
	tail := w.out.tail.Load()
	if tail != w.idleTail || w.in.head.Load() != tail {
		w.idleTail = tail
		return true, false
	}
	if !w.grab.CompareAndSwap(grabNobody, grabShrink) {
		return true, false
	}
	empty := w.out.tail.Load() == tail
	if empty && punch(w.pages.Load()) {
		w.limit.Store(Start)
		w.pages.Store(Start)
	}
	w.grab.Store(grabNobody)
	return !empty, true
}
