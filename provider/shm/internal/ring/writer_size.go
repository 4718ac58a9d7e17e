package ring

import (
	"math/bits"
	"runtime"
)

// Limit is how much of the ring the writer uses, in bytes.
func (w *Writer) Limit() uint64 { return w.limit.Load() }

// Pages is how much of the ring may have memory, in bytes. Beyond Start the budget counts
// it.
func (w *Writer) Pages() uint64 { return w.pages.Load() }

// MayGrow reports whether the ring could grow to Sure now.
func (w *Writer) MayGrow() bool {
	return w.pages.Load() >= min(Sure, w.max) || w.budget.HasSure()
}

// tryGrab keeps Shrink from the ring until ungrab. It fails while Shrink is at work.
func (w *Writer) tryGrab() bool {
	return w.grab.Load() == grabSender || w.grab.CompareAndSwap(grabNobody, grabSender)
}

func (w *Writer) ungrab() {
	if w.grab.Load() == grabSender {
		w.grab.Store(grabNobody)
	}
}

// grow raises the limit to the next power of two, or to Sure, which stands for 512 KiB: between
// the two there is too little for leap, so a writer that had gone on at the start of the ring at
// 512 KiB would never get there. From Sure on it needs the budget's consent.
func (w *Writer) grow(do *Action) bool {
	old, pages := w.limit.Load(), w.pages.Load()
	to := min(1<<bits.Len64(old), w.max)
	if old < Sure && to > Sure/2 {
		to = min(Sure, w.max)
	}
	if to <= old || !w.tryGrab() {
		return false
	}
	if to > pages {
		if !w.budget.Take(int64(to-pages), old < Sure) {
			return false
		}
		w.pages.Store(to)
		*do |= Grew
	}
	w.limit.Store(to)
	return true
}

// Shrink gives back the memory of a ring that has been empty since the last call, by
// calling free with how much of it may have memory, which returns it to the budget. It
// reports whether it has to be called again, and whether a Reserve may have found no room
// only because Shrink was at work.
func (w *Writer) Shrink(free func(pages uint64) bool) (again, met bool) {
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
	if empty && free(w.pages.Load()) {
		w.limit.Store(Start)
		w.pages.Store(Start)
	}
	w.grab.Store(grabNobody)
	return !empty, true
}

// Stop keeps Shrink out for good, after waiting for one at work. Nothing is written any
// more.
func (w *Writer) Stop() {
	for !w.tryGrab() {
		runtime.Gosched()
	}
}
