package sanconn

import (
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// interrupts records whether a deadline has interrupted the session.
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

func TestExpiry(t *testing.T) {
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

// A timer that fires just before the deadline is moved, but gets the lock afterwards, must not
// interrupt.
func TestExpiryLateTimer(t *testing.T) {
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

// Deadlines use the monotonic clock, as net's do, even if the program's time has no monotonic reading.
// Otherwise a step of the wall clock would change a deadline if the connection moves after the step.
func TestDeadlinesAreMonotonic(t *testing.T) {
	ln, err := net.Listen("tcp", "localhost:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	tcp, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	c := &Conn{tcp: tcp.(*net.TCPConn)}
	defer tcp.Close()
	for _, at := range []time.Time{time.Now().Add(time.Hour).Round(0), time.Now().Add(-time.Hour).UTC().Round(0), time.Now().Add(time.Minute)} {
		if err := c.SetDeadline(at); err != nil {
			t.Fatal(err)
		}
		for _, d := range []deadline{c.in.deadline, c.out.deadline} {
			if d.want == d.want.Round(0) || d.want.Sub(at).Abs() > time.Second {
				t.Errorf("the deadline is %v, and was set to %v", d.want, at)
			}
		}
	}
	if err := c.SetDeadline(time.Time{}); err != nil || !c.in.deadline.want.IsZero() {
		t.Errorf("no deadline is %v, %v", c.in.deadline.want, err)
	}
}
