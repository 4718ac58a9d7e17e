package sanconn

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// interrupts records the state that a deadline put the session into.
type interrupts struct {
	mu      sync.Mutex
	on      bool
	changes int
}

func (i *interrupts) set(on bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.on = on
	i.changes++
}

func (i *interrupts) want(t *testing.T, what string, on bool, changes int) {
	t.Helper()
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.on != on || i.changes != changes {
		t.Errorf("%s: interrupted %v after %d changes, want %v after %d", what, i.on, i.changes, on, changes)
	}
}

func TestAlarm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var i interrupts
		d := expiry{interrupt: i.set}
		d.set(time.Time{})
		i.want(t, "none", false, 0)
		d.set(time.Now().Add(time.Second))
		i.want(t, "to come", false, 0)
		d.set(time.Now().Add(3 * time.Second))
		time.Sleep(2 * time.Second)
		i.want(t, "moved away", false, 0)
		time.Sleep(2 * time.Second)
		i.want(t, "passed", true, 1)
		d.set(time.Now().Add(-1))
		i.want(t, "passed and moved into the past", true, 1)
		d.set(time.Now().Add(time.Second))
		i.want(t, "moved into the future", false, 2)
		d.set(time.Time{})
		time.Sleep(2 * time.Second)
		i.want(t, "cleared", false, 2)
		d.set(time.Now())
		i.want(t, "now", true, 3)
		d.set(time.Time{})
		i.want(t, "cleared", false, 4)
		d.set(time.Now().Add(3 * time.Second))
		d.set(time.Now().Add(time.Second))
		time.Sleep(2 * time.Second)
		i.want(t, "moved nearer", true, 5)
	})
}

// A timer that fires but gets the lock only after the deadline was moved must do nothing.
func TestAlarmLateTimer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var i interrupts
		d := expiry{interrupt: i.set}
		d.set(time.Now().Add(time.Hour))
		d.fire()
		i.want(t, "late, moved", false, 0)
		d.set(time.Time{})
		d.fire()
		i.want(t, "late, cleared", false, 0)
	})
}
