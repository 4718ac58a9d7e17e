package twin

import "github.com/sanconn/san/session"

// Kill ends this end's process at once: what it does from here on reaches
// nobody. On a ring, what was under way still arrives, and behind it the peer finds
// io.EOF if this end has dropped or released all data. Otherwise it finds
// ECONNRESET, and what was under way is lost unless there is a ring.
func (e *Endpoint) Kill() {
	e.w.mu.Lock()
	defer e.w.mu.Unlock()
	e.die()
}

// Killed says whether Kill, or Faults.DieAt, has ended this end's process.
func (e *Endpoint) Killed() bool {
	e.w.mu.Lock()
	defer e.w.mu.Unlock()
	return e.dead
}

func (e *Endpoint) die() {
	if e.ended() {
		return
	}
	p, now := e.peer(), e.w.now()
	for e.ops.len() > 0 { // no memory moves any more, but the zombie is told
		op := e.ops.pop()
		op.err = errKilled
		e.complete(op)
	}
	switch {
	case e.err != nil:
	case e.limits.Ring():
		err := errPeerEnd
		if p.untaken > 0 {
			err = errUnread
		}
		e.w.at(e.arrival(), event{end: p, kind: fin, err: err})
	default:
		e.w.at(now+e.w.latency(&e.dice, diceEnd), event{end: p, kind: fin, err: errVanish})
	}
	if e.err == nil {
		e.err = errKilled
	}
	e.dead = true
	e.wakes |= session.RecvReady | session.SendReady
	e.w.at(now, event{end: e, kind: stray})
}

// Cut the wire: from now on nothing arrives at either end, no memory moves
// and nobody is told.
func (e *Endpoint) Cut() {
	e.w.mu.Lock()
	defer e.w.mu.Unlock()
	e.w.cut = true
}

// Hold is what an end can be made to hold back.
type Hold uint8

const (
	HoldMessages Hold = 1 << iota // messages on their way to this end
	HoldReads                     // the completions of Reads that this end posted
	HoldWrites                    // the completions of its Writes
)

// Hold holds back what is named, and lets go of what was held and is not.
func (e *Endpoint) Hold(what Hold) {
	e.w.mu.Lock()
	defer e.w.mu.Unlock()
	e.held = what
	parked := e.parked
	e.parked = nil
	for _, ev := range parked {
		e.w.at(0, ev) // before all that is due now: order is kept
	}
}

// parks puts an event aside that is held back.
func (e *Endpoint) parks(ev event) bool {
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

// Left is what a session left behind.
type Left struct {
	Exposed   int // not revoked when the end was closed
	Allocated int // bytes not freed by now
	Kept      int // messages not released when the end was closed
	Posted    int // Reads and Writes without a completion when the end was closed
}

// Left says what the session left behind here; before Close or Abort, what it
// holds now.
func (e *Endpoint) Left() Left {
	e.w.mu.Lock()
	defer e.w.mu.Unlock()
	l := e.mem.left
	if !e.closed && !e.aborted {
		l = e.audit()
	}
	l.Allocated = e.mem.allocated
	return l
}

func (e *Endpoint) audit() Left {
	return Left{Exposed: len(e.mem.exposed), Kept: e.kept.len(), Posted: e.ops.len()}
}

// Closed says whether Close or Abort was called.
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

// Calls is the number of calls into this end so far, as Faults.DieAt counts
// them.
func (e *Endpoint) Calls() int {
	e.w.mu.Lock()
	defer e.w.mu.Unlock()
	return e.calls
}
