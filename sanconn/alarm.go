package sanconn

import (
	"sync"
	"time"
)

// alarm interrupts one direction of a session when its time comes, and
// lifts the interruption when it is moved or cleared.
type alarm struct {
	interrupt func(bool) // does not block

	mu      sync.Mutex  // guards the following, and orders the calls of interrupt
	timer   *time.Timer // made at first use, then reused
	at      time.Time   // with a monotonic reading; zero: none
	expired bool
	stopped bool
}

// set moves the deadline to t, unless it was stopped; the zero time means none.
func (d *alarm) set(t time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.stopped {
		return
	}
	if d.timer != nil {
		d.timer.Stop() // if it has just fired, fire sees that at has changed
	}
	d.at = time.Time{}
	expired := false
	if !t.IsZero() {
		// fire compares two monotonic readings, so that a step of the wall clock cannot
		// lose the deadline.
		now := time.Now()
		wait := t.Sub(now)
		d.at = now.Add(wait)
		if expired = wait <= 0; !expired {
			if d.timer == nil {
				d.timer = time.AfterFunc(wait, d.fire)
			} else {
				d.timer.Reset(wait)
			}
		}
	}
	d.change(expired)
}

// fire is the timer's function. The deadline may have moved before it runs.
func (d *alarm) fire() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.stopped || d.at.IsZero() || time.Until(d.at) > 0 {
		return
	}
	d.change(true)
}

// change tells the session if the state has changed. mu is held.
func (d *alarm) change(expired bool) {
	if d.expired != expired {
		d.expired = expired
		d.interrupt(expired)
	}
}

// stop ends the deadline for good.
func (d *alarm) stop() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.stopped = true
	if d.timer != nil {
		d.timer.Stop()
	}
}
