package session

import "time"

// What the box needs of a session: memory, which may have to be waited for, and a timer.

// prepareBox, for n bytes of a Write, requests the peer's inbox if there is none, and allocates
// the box once there is one. It gives one back that cannot be registered. wr.op is held.
func (e *engine) prepareBox(n int) {
	if e.plan.boxFrom == 0 {
		return
	}
	var old []byte
	alloc := false
	e.withSender(func(tx *sender) {
		switch {
		case tx.closed || tx.lent != nil:
		case tx.box.state == boxPlain && tx.box.used() == 0:
			old = tx.leaveInbox()
		default:
			alloc = tx.wantInbox(n)
		}
	})
	e.free(old)
	if alloc {
		buf := allocBox(e.mem, e.plan.boxSize)
		e.withSender(func(tx *sender) { tx.openBox(buf) })
	}
}

// restBoxesLocked starts the timer that gives the boxes back once they are idle. txMu is held.
func (e *engine) restBoxesLocked(tx *sender) {
	o := &tx.box
	if o.state >= boxGranted && !o.resting && !tx.closed {
		o.resting = true
		at := o.filled
		time.AfterFunc(boxRest, func() { e.leaveIfIdle(at) })
	}
}

// leaveIfIdle gives the boxes back if nothing was written since position at, and
// otherwise checks again after boxRest.
func (e *engine) leaveIfIdle(at int64) {
	if !e.workers.start() {
		return
	}
	defer e.workers.Done()
	alone := e.wr.op.tryLock()
	var buf []byte
	e.withSender(func(tx *sender) {
		tx.box.resting = false
		if alone && tx.box.idle(at) && !tx.closed && tx.lent == nil {
			buf = tx.leaveInbox()
		}
		e.restBoxesLocked(tx)
	})
	e.leftBehind()
	e.free(buf)
	if alone {
		e.wr.op.Unlock()
	}
}

// freeBox gives the memory back, after the endpoint and all operations have ended. A Write
// that comes too late still looks at the sender.
func (e *engine) freeBox() {
	var buf []byte
	e.withSender(func(tx *sender) { buf = tx.box.release() })
	e.free(buf)
}

// free gives a box back, if there is one.
func (e *engine) free(buf []byte) {
	if buf != nil {
		e.mem.Free(buf)
	}
}
