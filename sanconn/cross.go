package sanconn

import (
	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/session"
)

// crossLocked moves the direction to s, and then writes what is left of w, or of no Write if w is nil.
// No other Write uses the session before that is done, as the bytes would be mixed. op is held.
func (o *outgoing) crossLocked(c *Conn, s *session.Session, w *pendingWrite) (err error) {
	if !o.beginLocked(c, s, w != nil && w.n > 0) {
		return errLook
	}
	if w != nil {
		// If Close or CloseWrite came before the begin, it waits for op. If it came after the begin, it
		// ends the session's Writes itself.
		if err = o.stopped(c); err == nil {
			err = w.bySession(s)
		}
		switch err {
		case session.ErrTaken:
			err = errLook
		case session.ErrCut, errLook: // see again
		default:
			err = c.opError(opWrite, err)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.session == s && c.state.phase == onSAN { // otherwise both ends are leaving the session already
		o.san.Store(s)
		c.changedLocked() // for Moved
	}
	return err
}

// beginLocked tells the peer at which position this direction moves, if that was not done before.
// inWrite: the position is within the Write that goes on there; earlier Writes that were cut are
// counted in o.cut. It reports whether Writes go on on the session, which they do not if TCP has lost
// bytes. op is held.
func (o *outgoing) beginLocked(c *Conn, s *session.Session, inWrite bool) (goesOn bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.state.out.begun {
		return !c.state.out.broken
	}
	if inWrite || o.cut > 0 {
		s.InWrite() // before the begin: after it the session decides what a death means
	}
	at := c.state.begin(o.written.Load())
	c.steppedLocked()
	if !c.state.out.broken { // otherwise Writes fail by TCP
		o.deadline.toSession(s.InterruptWrite)
	}
	// With mu held, because the stream may be ended as soon as it is seen to have begun. SendNote fails
	// only if the session has ended, which Writes find.
	s.SendNote(positionNote(newconn.NoteBegin, at))
	return !c.state.out.broken
}

// unlock ends a use of op. If the direction may move by now, unlock moves it.
func (o *outgoing) unlock(c *Conn) {
	for {
		if s := o.next.Load(); s != nil {
			o.crossLocked(c, s, nil)
		}
		o.op.Unlock()
		if o.next.Load() == nil || !o.op.TryLock() {
			return // the present holder of op moves it
		}
	}
}

// nudge moves the direction, if it may move and no Write holds op. Otherwise the holder of op does.
func (o *outgoing) nudge(c *Conn) {
	if o.next.Load() != nil && o.op.TryLock() {
		o.unlock(c)
	}
}

// turnLocked turns the reader to the session if all that precedes the session was read. op is held.
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
			s.GiveBackRead(c.state.both) // a failed way back may have taken it
		}
		in.san.Store(s)
		c.changedLocked() // for Moved
	}
	c.mu.Unlock()
	if turns && beyond {
		s.Fail(errBehind) // Reads find this
	}
	return turns
}

// nudge makes the direction move, or go back to TCP, without waiting for a Read in TCP, where nothing
// may come any more.
func (in *incoming) nudge(c *Conn) {
	if in.op.TryLock() {
		in.unlock(c)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	in.deadline.hold(c.tcp)
}

// unlock ends a use of op. If all that precedes the session has been read by now, the direction turns
// to the session: a nudge that came meanwhile has left that to the holder of op.
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
