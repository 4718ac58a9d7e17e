package san

import (
	"sync"
	"time"
)

// acceptDeadline is a deadline that can be waited for and moved: a channel
// that is closed while it is past. The zero value is no deadline.
type acceptDeadline struct {
	mu      sync.Mutex
	timer   *time.Timer   // guarded by mu; nil: nothing to come
	expired chan struct{} // guarded by mu; nil at first
}

// wait gives the channel that is closed when the deadline passes.
func (d *acceptDeadline) wait() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.channel()
}

// channel makes one if there is none. Called with mu held.
func (d *acceptDeadline) channel() chan struct{} {
	if d.expired == nil {
		d.expired = make(chan struct{})
	}
	return d.expired
}

// set moves the deadline to t; the zero time means none. Those who wait
// follow, unless it had passed for them.
func (d *acceptDeadline) set(t time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	expired := d.channel()
	if d.timer != nil && !d.timer.Stop() {
		<-expired // its function runs and closes it at once
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
		expired = d.channel()
	}
	if !t.IsZero() {
		d.timer = time.AfterFunc(wait, func() { close(expired) })
	}
}
