package sanconn

import (
	"errors"
	"net"
	"os"
	"sync"
	"time"
)

// SetDeadline sets both deadlines; see net.Conn. An operation whose deadline
// has passed fails with os.ErrDeadlineExceeded, even if it could proceed at once. A
// Write that a deadline interrupts returns how many bytes it took. The error is
// net.ErrClosed after Close.
func (c *Conn) SetDeadline(t time.Time) error {
	if err := c.SetReadDeadline(t); err != nil {
		return err
	}
	return c.SetWriteDeadline(t)
}

// SetReadDeadline sets the deadline of Read; see SetDeadline.
func (c *Conn) SetReadDeadline(t time.Time) error {
	return c.in.deadline.set(c, t)
}

// SetWriteDeadline sets the deadline of Write; see SetDeadline.
func (c *Conn) SetWriteDeadline(t time.Time) error {
	return c.out.deadline.set(c, t)
}

// set sets the deadline on the carrier of the direction.
func (d *deadline) set(c *Conn, t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed.Load() {
		return &net.OpError{Op: opSet, Net: c.network(), Addr: c.LocalAddr(), Err: net.ErrClosed}
	}
	if t == t.Round(0) && !t.IsZero() { // without a monotonic reading
		now := time.Now()
		t = now.Add(t.Sub(now))
	}
	d.want = t
	c.changedLocked()
	switch {
	case d.expiry != nil:
		d.expiry.set(t)
		return nil
	case d.held:
		return nil
	}
	return d.setTCP(c.tcp, t)
}

// deadline is the deadline of a direction, on either carrier. Conn's mu guards it.
type deadline struct {
	want   time.Time // with a monotonic reading, as a step of the wall clock would move it on the next carrier; zero: none
	expiry *expiry   // of the session, if the direction has moved; else nil
	held   bool      // TCP's deadline is longAgo, so that an operation in TCP returns and looks at the state; expiry is nil
	writes bool      // of this end's direction
}

// longAgo is a deadline that ends an operation at once.
var longAgo = time.Unix(1, 0)

func (d *deadline) setTCP(tcp *net.TCPConn, t time.Time) error {
	if d.writes {
		return tcp.SetWriteDeadline(t)
	}
	return tcp.SetReadDeadline(t)
}

// hold makes present and later operations in TCP return at once, until restore. It does nothing once
// the direction is on a session, where there are no such operations.
func (d *deadline) hold(tcp *net.TCPConn) {
	if d.expiry == nil {
		d.held = true
		d.setTCP(tcp, longAgo)
	}
}

// restore ends hold, and reports whether it was in force.
func (d *deadline) restore(tcp *net.TCPConn) bool {
	if !d.held {
		return false
	}
	d.held = false
	d.setTCP(tcp, d.want)
	return true
}

// passed returns the error of an operation if the deadline has passed.
func (d *deadline) passed(c *Conn) error {
	if d.want.IsZero() || time.Now().Before(d.want) {
		return nil
	}
	op := opRead
	if d.writes {
		op = opWrite
	}
	return c.opError(op, os.ErrDeadlineExceeded)
}

// awaitLocked waits for a change of c's state, until the deadline. mu is held, and released meanwhile.
func (d *deadline) awaitLocked(c *Conn) error {
	err := d.passed(c)
	if err == nil {
		c.awaitLocked(d.want)
	}
	return err
}

// toSession makes the deadline interrupt a session from now on.
func (d *deadline) toSession(interrupt func(bool)) {
	// A separate allocation: a running timer keeps its expiry alive, and must not keep a forgotten Conn
	// from being collected.
	d.expiry, d.held = &expiry{interrupt: interrupt}, false
	d.expiry.set(d.want)
}

// toTCP undoes toSession.
func (d *deadline) toTCP(tcp *net.TCPConn) {
	if d.expiry != nil {
		d.expiry.stop()
	}
	d.expiry, d.held = nil, false
	d.setTCP(tcp, d.want)
}

// close makes the operations of a closed connection return. On a session, this end's close of the
// session does that.
func (d *deadline) close(tcp *net.TCPConn) {
	if d.expiry != nil {
		d.expiry.stop()
	}
	d.hold(tcp)
}

// afterTCP returns what an error of TCP means: errLook if the operation was only woken to look at the
// state.
func (d *deadline) afterTCP(c *Conn, op string, err error) error {
	if !errors.Is(err, os.ErrDeadlineExceeded) && !errors.Is(err, net.ErrClosed) {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.closed.Load():
		return c.opError(op, net.ErrClosed)
	case d.restore(c.tcp):
		return errLook
	case d.writes && c.state.out.shut, !d.writes && c.state.in.shut: // the end of a proposal has ended their hold
		return errLook
	}
	return err
}

// expiry interrupts one direction of a session when the deadline comes, and ends the interruption when
// the deadline is moved or cleared.
type expiry struct {
	interrupt func(bool) // must not block

	mu      sync.Mutex  // guards the fields below, and orders the calls of interrupt
	at      time.Time   // with a monotonic reading; zero: none
	timer   *time.Timer // made at the first use, then reused
	fires   time.Time   // when timer fires; zero: it does not
	expired bool
}

// set moves the deadline to t; the zero time means none. A timer that fires before t is left alone, and
// set again when it has fired: many programs move the deadline, or clear and set it, with each call,
// and setting a timer would take most of the time of that.
func (d *expiry) set(t time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if t.IsZero() {
		d.at = time.Time{}
		d.change(false)
		return
	}
	// fire compares two monotonic readings, so that a step of the wall clock cannot lose the deadline.
	now := time.Now()
	wait := t.Sub(now)
	d.at = now.Add(wait)
	if wait > 0 && (d.fires.IsZero() || d.at.Before(d.fires)) {
		d.start(wait)
	}
	d.change(wait <= 0)
}

// stop clears the deadline, and stops the timer, which would keep the session alive.
func (d *expiry) stop() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.at = time.Time{}
	d.change(false)
	if d.timer != nil {
		d.timer.Stop() // if it has just fired, fire finds no deadline
		d.fires = time.Time{}
	}
}

// start makes the timer fire after wait. mu is held.
func (d *expiry) start(wait time.Duration) {
	if d.timer == nil {
		d.timer = time.AfterFunc(wait, d.fire)
	} else {
		d.timer.Reset(wait)
	}
	d.fires = d.at
}

// fire is the timer's function. The deadline may have been moved before it runs.
func (d *expiry) fire() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.fires = time.Time{}
	switch wait := time.Until(d.at); {
	case d.at.IsZero():
	case wait > 0:
		d.start(wait)
	default:
		d.change(true)
	}
}

// change interrupts the session, or ends the interruption, if the state has changed. mu is held.
func (d *expiry) change(expired bool) {
	if d.expired != expired {
		d.expired = expired
		d.interrupt(expired)
	}
}
