package session

import "time"

// What the box needs of a session: memory, which may have to be waited for, and a timer.

// openBox, for n bytes of a Write, requests the peer's inbox if there is none and n is not 0,
// and allocates a registered box once there is one. It gives one back that cannot be
// registered, or is too small; full: that is to be emptied before. wr.op is held.
func (c *core) openBox(n int) (full bool) {
	var old []byte
	alloc, size := false, 0
	c.withSender(func(tx *sender) {
		size = max(tx.box.size, tx.box.unsent()) // what waits on the heap is to fit
		switch outgrown := tx.outgrown(); {
		case tx.gone || tx.lent != nil:
		case outgrown && tx.box.used() > 0:
			full = true
		case outgrown:
			old = tx.grow()
		case tx.box.unusable():
			old = tx.leaveInbox()
		default:
			alloc = tx.wantInbox(n)
		}
	})
	if old != nil {
		c.mem.Free(old)
	}
	if !alloc {
		return full
	}
	buf := allocBox(c.mem, &c.lim, size)
	c.withSender(func(tx *sender) { buf = tx.openBox(buf) })
	if buf != nil {
		c.mem.Free(buf)
	}
	return false
}

// openBoxFor is openBox for n bytes of a Write, which goes on once there is room for least of
// them. If a larger box is to take the place of the one there is, and that has no such room, it
// waits until that is empty.
func (w *writing) openBoxFor(n, least int) {
	test := func(sure bool) Events {
		w.progressForWrite(sure)
		if w.writeBlocked() != nil || !w.openBox(n) {
			return 0
		}
		return w.writeWant()
	}
	if w.openBox(n) && w.boxShort(least) {
		w.await(&w.wr, test(false), test)
	}
}

// boxShort reports whether the box has room for less than n bytes.
func (c *core) boxShort(n int) (short bool) {
	c.withSender(func(tx *sender) { short = tx.box.room() < n })
	return short
}

// restBoxes starts the timer that gives the boxes back once they are idle.
func (c *core) restBoxes() { c.withSender(c.restBoxesLocked) }

func (c *core) restBoxesLocked(tx *sender) {
	o := &tx.box
	if o.inbox.Len > 0 && !o.resting && !tx.gone {
		o.resting = true
		at := o.filled
		time.AfterFunc(boxRest, func() { c.leaveIfIdle(at) })
	}
}

// leaveIfIdle gives the boxes back if nothing was written since position at, and
// otherwise checks again after boxRest.
func (c *core) leaveIfIdle(at int64) {
	if !c.workers.start() {
		return
	}
	defer c.workers.Done()
	alone := c.wr.op.tryLock()
	var buf []byte
	c.withSender(func(tx *sender) {
		tx.box.resting = false
		if alone && tx.box.idle(at) && !tx.gone && tx.lent == nil {
			buf = tx.leaveInbox()
		}
		c.restBoxesLocked(tx)
	})
	c.leftBehind()
	if buf != nil {
		c.mem.Free(buf)
	}
	if alone {
		c.wr.op.Unlock()
	}
}

// freeBox gives the memory back, after the endpoint and all operations have ended.
func (c *core) freeBox() {
	if buf := c.tx.box.release(); buf != nil {
		c.mem.Free(buf)
	}
}
