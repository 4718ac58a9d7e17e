package ring

import (
	"math/bits"
	"runtime"
	"sync/atomic"
)

// extent is how much of a ring its writer uses, and how much of it may have memory. What is above Start
// belongs to whoever has grabbed it.
type extent struct {
	budget Share
	max    uint64 // upper bound of limit

	limit    atomic.Uint64 // the sender raises it; Shrink lowers it while it has the grab
	pages    atomic.Uint64 // likewise: how much of the ring may have memory; at least limit
	grab     atomic.Uint32 // needed while pages is above Start
	idleTail uint64        // for Shrink: out.tail when Shrink looked last, or neverLooked
	starved  bool          // the budget last had nothing left for growth to Sure; only the sender uses it
}

// Who may use a ring that has grown: nobody; the sender, from Reserve to Commit, and for good after
// Stop; or Shrink, while it gives pages back.
const (
	grabNobody = iota
	grabSender
	grabShrink
)

// neverLooked is not a valid position. So Shrink's first look never finds a new ring idle, which may
// have inherited memory.
const neverLooked = ^uint64(0)

func (x *extent) init(most int, pages uint64, b Share) {
	x.budget, x.max = b, uint64(most)
	x.limit.Store(Start) // small, to stay in the caches, however many pages there are
	x.pages.Store(max(pages, Start))
	x.idleTail = neverLooked
}

// Pages returns how many bytes of the ring may have memory. What is beyond Start is counted in the
// budget.
func (x *extent) Pages() uint64 { return x.pages.Load() }

// MayGrow reports whether the ring could grow to Sure now.
func (x *extent) MayGrow() bool {
	return x.pages.Load() >= min(Sure, x.max) || x.budget.HasSure()
}

// Starved reports, after a Reserve has found no room, whether that is for lack of budget for growth to
// Sure. It is one of the sender's methods.
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

// grow raises the limit to the next power of two, with Sure in place of 512 KiB. The difference between
// these two is too small for leap, so a writer that had continued at the start of the ring at 512 KiB
// would never use it. From Sure on the budget must permit the growth.
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

// Stop keeps Shrink from the ring for good. It waits while Shrink is at work. Nothing may be written
// afterwards.
func (x *extent) Stop() {
	for !x.tryGrab() {
		runtime.Gosched()
	}
}

// Shrink gives back the memory of a ring that has been empty since the last call: punch gives back the
// given number of bytes, also to the budget, and reports whether it could. again: Shrink has to be
// called again. met: a Reserve may have found no room only because Shrink was at work.
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
