package shm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/session"
)

// A link that ends before it answers may have ended because it was idle: the error tells that another
// link may work.
func TestDialTellsThatALinkHasEnded(t *testing.T) {
	leaks(t)
	var came atomic.Int32
	at := serveName(t, func(*net.UnixConn) { came.Add(1) }) // and then it hangs up
	for n := range int32(2) {
		_, err := dialOnce(at, Config{})
		var u *session.Unavailable
		if !errors.As(err, &u) || u.Reason != session.ReasonNoListener || !errors.Is(err, ErrLinkGone) {
			t.Errorf("got %v, want %v", err, session.ReasonNoListener)
		}
		if got := came.Load(); got != n+1 {
			t.Errorf("%d links for %d dials", got, n+1)
		}
	}
}

// A dial waits for a link that another dial, with a shorter timeout, has requested. When that one fails,
// the first goes on.
func TestPatientDialOutlastsAnImpatientOne(t *testing.T) {
	leaks(t)
	asked := make(chan struct{}, 16)
	at := serveName(t, func(c *net.UnixConn) {
		asked <- struct{}{}
		io.Copy(io.Discard, c)
	})
	const little, much = 50 * time.Millisecond, 500 * time.Millisecond
	impatient := make(chan error, 1)
	ask := func() {
		_, err := dial(at, Config{timeout: little})
		impatient <- err
	}
	go ask()
	for end, isAsked := time.Now().Add(patience), false; !isAsked; {
		select {
		case <-asked:
			isAsked = true
		case err := <-impatient: // the machine was busy for that long
			if time.Now().After(end) {
				t.Fatalf("the name is not asked: %v", err)
			}
			go ask()
		}
	}
	began := time.Now()
	_, err := dial(at, Config{timeout: much})
	if took := time.Since(began); took < much*9/10 {
		t.Errorf("%v after %v, with %v of time", err, took, much)
	}
	for _, err := range []error{err, <-impatient} {
		var u *session.Unavailable
		if !errors.As(err, &u) || u.Reason != session.ReasonTimeout {
			t.Errorf("%v, want %v", err, session.ReasonTimeout)
		}
	}
}

// A dial does not wait for a stopped process.
func TestDialToAStoppedProcess(t *testing.T) {
	leaks(t)
	c := spawn(t, "echo", nil)
	first := dialChild(t, c, Config{})
	c.cmd.Process.Signal(syscall.SIGSTOP)
	defer c.cmd.Process.Signal(syscall.SIGCONT)
	var status unix.WaitStatus
	if _, err := unix.Wait4(c.cmd.Process.Pid, &status, unix.WUNTRACED, nil); err != nil || !status.Stopped() {
		t.Fatalf("not stopped: %v, %v", status, err)
	}
	for range 3 {
		ep, err := Dial(t.Context(), c.at.port, c.at.name, c.at.user, Config{})
		if err != nil {
			t.Fatal(err)
		}
		var ev session.Event
		if ep.Poll(&ev) || ep.Err() != nil {
			t.Errorf("of a stopped process: %+v, %v", ev, ep.Err())
		}
		end(ep)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Dial(ctx, c.at.port, c.at.name, c.at.user, Config{}); err == nil {
		t.Error("dialed although cancelled")
	}
	end(first)
}

// One end of a connection was closed before the other one existed. The slot is used again once that one
// is closed as well.
func TestSlotOfAnEndThatIsClosedBeforeTheOtherIsThere(t *testing.T) {
	leaks(t)
	l := listen(t, Config{})
	a, b := meet(t, l)
	defer end(a)
	defer end(b)
	l.mu.Lock() // keeps the listener from accepting
	given, err := Dial(t.Context(), l.at.port, l.at.name, l.at.user, Config{})
	if err != nil {
		t.Fatal(err)
	}
	end(given)
	l.mu.Unlock()
	late, err := l.accept()
	if err != nil {
		t.Fatal(err)
	}
	var ev session.Event
	if late.Poll(&ev) || !errors.Is(late.Err(), syscall.EPIPE) {
		t.Errorf("the connection that nobody has: %v", late.Err())
	}
	end(late)
	near := a.(*endpoint).link
	testenv.Eventually(t, patience, func() error {
		near.slots.mu.Lock()
		defer near.slots.mu.Unlock()
		near.slots.reapLocked(firstSlots) // as a dial does if no slot is free
		if n := len(near.slots.free); n != firstSlots-1 {
			return fmt.Errorf("%d slots are free, want %d", n, firstSlots-1)
		}
		return nil
	})
}

// A process has at most MostNames links for one port and user, however many processes listen there. A
// link that has ended is replaced. Links for other ports are not counted.
func TestLinksWithManyProcesses(t *testing.T) {
	leaks(t)
	port := freePort(t)
	var ends []session.Endpoint
	defer func() {
		for _, ep := range ends {
			end(ep)
		}
	}()
	var last *served
	for range MostNames {
		last = listenAt(t, port, Config{})
		a, b := meet(t, last)
		ends = append(ends, a, b)
	}
	further := listenAt(t, port, Config{})
	_, err := dial(further.at, Config{})
	wantReason(t, err, session.ReasonResources)
	a, b := meet(t, listen(t, Config{}))
	ends = append(ends, a, b)
	ends[len(ends)-4].(*endpoint).link.listenerClosed.Store(true) // as if the listener had hung up an idle link
	a, b = meet(t, last)
	ends = append(ends, a, b)
}
