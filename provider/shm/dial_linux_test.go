package shm

import (
	"os"
	"runtime"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/session"
)

func TestDialReachesTheProcessOfANumber(t *testing.T) {
	leaks(t)
	port := freePort(t)
	for number := range 3 {
		l := listenAt(t, port, Config{})
		if l.number != number {
			t.Fatalf("number %d, want %d", l.number, number)
		}
		a, b := meet(t, l)
		defer end(a)
		defer end(b)
		if a.Limits().Provider != Name || b.Limits().Provider != Name {
			t.Error("another provider")
		}
		if user := uint32(os.Geteuid()); PeerUser(a) != user || PeerUser(b) != user {
			t.Errorf("users %d and %d, want %d", PeerUser(a), PeerUser(b), user)
		}
		p, q := newPeer(a), newPeer(b)
		pingPong(t, p, q)
	}
}

// pingPong has a message go each way.
func pingPong(t *testing.T, p, q *peer) {
	t.Helper()
	for _, way := range []struct {
		from, to *peer
		text     string
	}{{p, q, "ping"}, {q, p, "pong"}} {
		way.from.send([]byte(way.text))
		var ev session.Event
		if !way.to.poll(&ev) || string(ev.Msg) != way.text {
			t.Fatalf("got %q, %v, want %q", ev.Msg, way.to.Err(), way.text)
		}
		way.to.Drop()
	}
}

// A connection that is withdrawn before the process has taken it is never taken; one that has been
// taken goes on.
func TestWithdraw(t *testing.T) {
	leaks(t)
	l := listen(t, Config{})
	a, b := meet(t, l)
	defer end(a)
	defer end(b)
	if a.(session.Withdrawer).Withdraw() {
		t.Error("withdrawn, and it has been taken")
	}
	late := a.(*endpoint) // it was taken while Withdraw looked
	late.local.v.Store(late.turn | stateWithdrawn | stateHeld)
	l.mu.Lock() // which is needed to take one
	c, err := Dial(t.Context(), l.at.port, l.at.number, l.at.user, Config{})
	withdrawn := err == nil && c.(session.Withdrawer).Withdraw()
	l.mu.Unlock()
	if !withdrawn {
		t.Fatalf("not withdrawn, or not dialed: %v", err)
	}
	d, e := meet(t, l) // behind it
	defer end(d)
	defer end(e)
	abort(c)
	var closed *peer
	for _, ends := range [][2]session.Endpoint{{d, e}, {a, b}} {
		p, q := newPeer(ends[0]), newPeer(ends[1])
		closed = q
		pingPong(t, p, q)
	}
	a.Close()
	var ev session.Event
	if closed.poll(&ev) || closed.Err() != errPeerClosed {
		t.Errorf("the peer of one that was withdrawn in vain, and closed: %v", closed.Err())
	}
}

func TestDialSaysWhyNot(t *testing.T) {
	leaks(t)
	port := freePort(t)
	l := listenAt(t, port, Config{})
	us := uint32(os.Geteuid())
	for name, tc := range map[string]struct {
		at     place
		reason session.Reason
	}{
		"nobody has the name":        {place{port, 2, us}, session.ReasonNoListener},
		"no such number":             {place{port, Numbers, us}, session.ReasonNoListener},
		"it is to be another user's": {place{port, l.number, us + 1}, session.ReasonOwner},
	} {
		_, err := dial(tc.at, Config{})
		if wantReason(t, err, tc.reason); t.Failed() {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Two processes may have the same name in two network namespaces: those of the threads that
// listen and dial.
func TestNamesBelongToTheNetworkNamespaceOfTheCaller(t *testing.T) {
	testenv.NeedRoot(t)
	leaks(t)
	here := listen(t, Config{})
	a, b := meet(t, here)
	defer end(a)
	defer end(b)
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // for good: the thread ends with the goroutine
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			t.Error(err)
			return
		}
		_, err := dial(here.at, Config{})
		wantReason(t, err, session.ReasonNoListener)
		var came atomic.Int32
		l, err := Listen(here.at.port, Config{}, func(ep session.Endpoint) { came.Add(1); end(ep) })
		if err != nil {
			t.Error(err)
			return
		}
		if there, err := dial(here.at, Config{}); err != nil {
			t.Error(err)
		} else {
			end(there)
		}
		l.Close()
		if n := came.Load(); n != 1 {
			t.Errorf("%d connections came to the listener of the namespace", n)
		}
	}()
	<-done
	if len(here.taken) > 0 {
		t.Error("a connection came from the other namespace")
	}
}
