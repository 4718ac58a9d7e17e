package session

import "time"

// What the box needs of a session: memory, which may have to be waited for, and a timer.

// prepareBox, for n bytes of a Write, requests the peer's inbox if there is none, and allocates
// the box once there is one. It gives one back that cannot be registered. wr.op is held.
func (c *core) prepareBox(n int) {
	if c.plan.boxFrom == 0 {
		return
	}
	var old []byte
	alloc := false
	c.withSender(func(tx *sender) {
		switch {
		case tx.closed || tx.lent != nil:
		case tx.box.state == boxPlain && tx.box.used() == 0:
			old = tx.leaveInbox()
		default:
			alloc = tx.wantInbox(n)
		}
	})
	c.free(old)
	if alloc {
		buf := allocBox(c.mem, c.plan.boxSize)
		c.withSender(func(tx *sender) { tx.openBox(buf) })
	}
}

// restBoxesLocked starts the timer that gives the boxes back once they are idle. txMu is held.
func (c *core) restBoxesLocked(tx *sender) {
	o := &tx.box
	if o.state >= boxGranted && !o.resting && !tx.closed {
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
		if alone && tx.box.idle(at) && !tx.closed && tx.lent == nil {
			buf = tx.leaveInbox()
		}
		c.restBoxesLocked(tx)
	})
	c.leftBehind()
	c.free(buf)
	if alone {
		c.wr.op.Unlock()
	}
}

// freeBox gives the memory back, after the endpoint and all operations have ended. A Write
// that comes too late still looks at the sender.
func (c *core) freeBox() {
	var buf []byte
	c.withSender(func(tx *sender) { buf = tx.box.release() })
	c.free(buf)
}

// free gives a box back, if there is one.
func (c *core) free(buf []byte) {
	if buf != nil {
		c.mem.Free(buf)
	}
}
