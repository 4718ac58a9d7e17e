package san

import (
	"sync"
	"time"
)

// acceptDeadline is a deadline that can be waited for and moved: a channel that is closed
// once it has passed. The zero value is no deadline.
type acceptDeadline struct {
	mu      sync.Mutex
	timer   *time.Timer   // guarded by mu; nil: nothing to come
	expired chan struct{} // guarded by mu; nil at first
}

// wait returns the channel that is closed when the deadline passes.
func (d *acceptDeadline) wait() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.channelLocked()
}

// channelLocked returns the channel, and makes it if need be. mu must be held.
func (d *acceptDeadline) channelLocked() chan struct{} {
	if d.expired == nil {
		d.expired = make(chan struct{})
	}
	return d.expired
}

// set moves the deadline to t; the zero time means none. It applies to waits under way
// too, unless the deadline had already passed for them.
func (d *acceptDeadline) set(t time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	expired := d.channelLocked()
	if d.timer != nil && !d.timer.Stop() {
		<-expired // the timer has fired: its function closes the channel
	}
	d.timer = nil
	past := false
	select {
	case <-expired:
		past = true
	default:
	}
	wait := time.Until(t)
	switch {
	case !t.IsZero() && wait <= 0:
		if !past {
			close(expired)
		}
		return
	case past:
		d.expired = nil
		expired = d.channelLocked()
	}
	if !t.IsZero() {
		d.timer = time.AfterFunc(wait, func() { close(expired) })
	}
}
