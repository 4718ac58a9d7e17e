package session

import "time"

// What the send buffer needs of a session: memory, for which it may have to wait, and a timer.

// prepareBuffer, for n bytes of a Write, requests the peer's inbox if there is none, and allocates the
// send buffer once there is one. It gives a send buffer back that cannot be registered. wr.op is held.
func (e *engine) prepareBuffer(n int) {
	if e.terms.bufferFrom == 0 {
		return
	}
	var old []byte
	alloc := false
	e.withSender(func(tx *sender) {
		switch {
		case tx.closed || tx.reserved != nil:
		case tx.buffer.state == bufferPlain && tx.buffer.used() == 0:
			old = tx.leaveInbox()
		default:
			alloc = tx.wantInbox(n)
		}
	})
	e.freeBuffer(old)
	if alloc {
		buf := allocBuffer(e.mem, e.terms.bufferSize)
		e.withSender(func(tx *sender) { tx.openBuffer(buf) })
	}
}

// restBufferLocked starts the timer that gives the buffers back when they are idle. txMu is held.
func (e *engine) restBufferLocked(tx *sender) {
	o := &tx.buffer
	if o.state >= bufferGranted && !o.resting && !tx.closed {
		o.resting = true
		at := o.filled
		time.AfterFunc(bufferRest, func() { e.leaveIfIdle(at) })
	}
}

// leaveIfIdle gives the buffers back if nothing was written since position at; otherwise it checks
// again after bufferRest.
func (e *engine) leaveIfIdle(at int64) {
	if !e.workers.start() {
		return
	}
	defer e.workers.Done()
	alone := e.wr.op.tryLock()
	var buf []byte
	e.withSender(func(tx *sender) {
		tx.buffer.resting = false
		if alone && tx.buffer.idle(at) && !tx.closed && tx.reserved == nil {
			buf = tx.leaveInbox()
		}
		e.restBufferLocked(tx)
	})
	e.enlistPending()
	e.freeBuffer(buf)
	if alone {
		e.wr.op.Unlock()
	}
}

// freeBuffer gives back a send buffer's memory, if there is one.
func (e *engine) freeBuffer(buf []byte) {
	if buf != nil {
		e.mem.Free(buf)
	}
}
