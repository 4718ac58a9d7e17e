package twin

import "github.com/sanconn/san/session"

// Kill ends this end's process at once: its later calls have no effect. On a ring, messages in flight
// still arrive, and then the peer finds io.EOF if this end has dropped or released all data. Otherwise
// the peer finds ECONNRESET, and without a ring messages in flight are lost.
func (e *Endpoint) Kill() {
	e.w.mu.Lock()
	defer e.w.mu.Unlock()
	e.dieLocked()
}

// Break ends the connection at both ends at once, as when a link fails: both processes live on.
func (e *Endpoint) Break() {
	e.w.mu.Lock()
	defer e.w.mu.Unlock()
	e.dieLocked()
	e.peer().dieLocked()
}

// Killed reports whether Kill, Break, or Faults.DieAt has ended this end.
func (e *Endpoint) Killed() bool {
	e.w.mu.Lock()
	defer e.w.mu.Unlock()
	return e.dead
}

func (e *Endpoint) dieLocked() {
	if e.endedLocked() {
		return
	}
	p, now := e.peer(), e.w.nowLocked()
	e.mem.stopLocked(func(op *operation) { // a dead process's operations still complete
		op.err = errKilled
		e.mem.completeLocked(op)
	})
	switch {
	case e.err != nil:
	case e.limits.Ring():
		err := errPeerEnd
		if p.tx.untaken > 0 {
			err = errUnread
		}
		e.w.scheduleLocked(e.tx.arrivalLocked(), event{end: p, kind: fin, err: err})
	default:
		e.w.scheduleLocked(now+e.w.latency(&e.dice, diceEnd), event{end: p, kind: fin, err: errVanish})
	}
	if e.err == nil {
		e.err = errKilled
	}
	e.dead = true
	e.wakes |= session.RecvReady | session.SendReady
	e.w.scheduleLocked(now, event{end: e, kind: stray})
}

// Cut cuts the wire: from now on nothing arrives at either end, no memory moves, and no end is noticed.
func (e *Endpoint) Cut() {
	e.w.mu.Lock()
	defer e.w.mu.Unlock()
	e.w.cut = true
}

// SetOfferFrom makes n the size in bytes from which memory pays at this end.
func (e *Endpoint) SetOfferFrom(n int) {
	e.w.mu.Lock()
	defer e.w.mu.Unlock()
	e.mem.offerFrom = n
}

// Hold is a set of things that an end can be made to hold back.
type Hold uint8

const (
	HoldMessages Hold = 1 << iota // messages on their way to this end
	HoldReads                     // the completions of Reads that this end posted
	HoldWrites                    // the completions of its Writes
)

// Hold holds back exactly what, and lets everything else go on that was held.
func (e *Endpoint) Hold(what Hold) {
	e.w.mu.Lock()
	defer e.w.mu.Unlock()
	e.held = what
	parked := e.parked
	e.parked = nil
	for _, ev := range parked {
		e.w.scheduleLocked(0, ev) // before everything that is due now, so that the order is kept
	}
}

// parksLocked puts an event aside if it is to be held back, and reports whether it did.
func (e *Endpoint) parksLocked(ev event) bool {
	held := false
	switch ev.kind {
	case arrive:
		held = e.held&HoldMessages != 0
	case fin:
		held = e.held&HoldMessages != 0 && ev.err != errAborted && ev.err != errVanish
	case done:
		held = ev.op.kind == opRead && e.held&HoldReads != 0 || ev.op.kind == opWrite && e.held&HoldWrites != 0
	}
	if held {
		e.parked = append(e.parked, ev)
	}
	return held
}

// Left is what a session has left behind.
type Left struct {
	Exposed   int // not revoked when the end was closed
	Allocated int // bytes that were not freed by now
	Kept      int // messages not released when the end was closed
	Posted    int // Reads and Writes without a completion when the end was closed
}

// Left returns what the session has left behind here, or before Close or Abort what it has now.
func (e *Endpoint) Left() Left {
	e.w.mu.Lock()
	defer e.w.mu.Unlock()
	l := e.mem.left
	if !e.closed && !e.aborted {
		l = e.auditLocked()
	}
	l.Allocated = e.mem.allocated
	return l
}

func (e *Endpoint) auditLocked() Left {
	return Left{Exposed: len(e.mem.exposed), Kept: e.rx.kept.len(), Posted: e.mem.ops.len()}
}

// Closed reports whether Close or Abort was called.
func (e *Endpoint) Closed() bool {
	e.w.mu.Lock()
	defer e.w.mu.Unlock()
	return e.closed || e.aborted
}

// Retired reports whether Retire was called.
func (e *Endpoint) Retired() bool {
	e.w.mu.Lock()
	defer e.w.mu.Unlock()
	return e.retired
}

// Calls returns the number of calls into this end so far, by which Faults.DieAt counts.
func (e *Endpoint) Calls() int {
	e.w.mu.Lock()
	defer e.w.mu.Unlock()
	return e.calls
}
