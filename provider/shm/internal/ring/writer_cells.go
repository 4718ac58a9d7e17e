package ring

// freeCell returns the memory of the next free cell, or nil.
func (w *Writer) freeCell(do *Action) []byte {
	if w.err != nil || w.alone {
		return nil
	}
	h := w.in.spareHead.Load()
	if h < w.spareHead || h > w.spareTail {
		w.broken(do, "head of cells %d outside %d to %d", h, w.spareHead, w.spareTail)
		return nil
	}
	w.spareHead = h
	if w.spareTail-h == Spares {
		return nil
	}
	return w.cells[w.spareTail%Spares].data[:]
}

// commitCell shows the reader a cell. To keep the order, the reader takes it only after
// everything already published in the ring.
func (w *Writer) commitCell(n int) (do Action) {
	c := &w.cells[w.spareTail%Spares]
	c.size.Store(uint64(n))
	if w.tail != w.published {
		do = w.publish() // a pad
	}
	c.after.Store(w.published)
	w.spareTail++
	w.out.spareTail.Store(w.spareTail)
	return do | w.wake()
}
