package sanconn

import (
	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/session"
)

// crossLocked moves the direction, and writes what is left of a Write by the session; nil: there is
// none. No other Write goes to the session before that is done: their bytes would be mixed. op is held.
func (o *outgoing) crossLocked(c *Conn, s *session.Session, w *pendingWrite) (err error) {
	if !o.beginLocked(c, s, w != nil && w.n > 0) {
		return errLook
	}
	if w != nil {
		// Close and CloseWrite wait for op if they came before the begin, and end the session's
		// Writes themselves if they come behind it.
		if err = o.stopped(c); err == nil {
			err = w.bySession(s)
		}
		switch err {
		case session.ErrTaken:
			err = errLook
		case session.ErrCut, errLook: // for again
		default:
			err = c.opError(opWrite, err)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.session == s && c.state.phase == onSAN { // else both ends leave it already
		o.san.Store(s)
		c.changedLocked() // for Moved
	}
	return err
}

// beginLocked tells the peer that this direction moves here, unless that has been done. inWrite: within
// the Write that goes on there; others that were cut are known. It reports whether Writes go on there:
// not if TCP has lost some. op is held.
func (o *outgoing) beginLocked(c *Conn, s *session.Session, inWrite bool) (goesOn bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.state.out.begun {
		return !c.state.out.broken
	}
	if inWrite || o.cut > 0 {
		s.InWrite() // before the begin: from then on a death counts at the session
	}
	at := c.state.begin(o.written.Load())
	c.steppedLocked()
	if !c.state.out.broken { // else Writes fail by TCP
		o.deadline.toSession(s.InterruptWrite)
	}
	// With mu held, as the stream may be ended as soon as it is seen to have begun. It fails only if
	// the session has ended, which Writes find.
	s.SendNote(positionNote(newconn.NoteBegin, at))
	return !c.state.out.broken
}

// unlock ends a use of op. If the direction may move by now, it does.
func (o *outgoing) unlock(c *Conn) {
	for {
		if s := o.next.Load(); s != nil {
			o.crossLocked(c, s, nil)
		}
		o.op.Unlock()
		if o.next.Load() == nil || !o.op.TryLock() {
			return // its holder comes by here
		}
	}
}

// nudge has the direction move, if it may, as soon as no Write is in its way.
func (o *outgoing) nudge(c *Conn) {
	if o.next.Load() != nil && o.op.TryLock() {
		o.unlock(c)
	}
}

// turnLocked turns to the session if all that comes before it was read. op is held.
func (in *incoming) turnLocked(c *Conn) bool {
	if in.holds() {
		return false
	}
	c.mu.Lock()
	s, read := c.session, in.bytes.Load()
	beyond := c.state.beyond(read)
	turns := c.state.phase == onSAN && (beyond || c.state.turns(read))
	if turns {
		if in.deadline.expiry == nil {
			in.deadline.toSession(s.InterruptRead)
		}
		if c.state.in.shut {
			s.StopRead()
		} else {
			s.GiveBackRead(c.state.both) // a way back in vain may have taken it
		}
		in.san.Store(s)
		c.changedLocked() // for Moved
	}
	c.mu.Unlock()
	if turns && beyond {
		s.Fail(errBehind) // and Reads find that
	}
	return turns
}

// nudge has the direction move, or go back to TCP, without waiting for the Read that is in
// TCP, where nothing may come any more.
func (in *incoming) nudge(c *Conn) {
	if in.op.TryLock() {
		in.unlock(c)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	in.deadline.hold(c.tcp)
}

// unlock ends a use of op. If all that comes before the session has been read by now, the
// direction turns: a nudge that came meanwhile has left that to the holder of op.
func (in *incoming) unlock(c *Conn) {
	for {
		begun := in.begun.Load()
		if begun && in.san.Load() == nil && !in.suspended.Load() {
			in.turnLocked(c)
		}
		in.op.Unlock()
		if begun || !in.begun.Load() || !in.op.TryLock() {
			return
		}
	}
}
