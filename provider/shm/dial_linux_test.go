package shm

import (
	"errors"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/session"
)

func TestDialReachesTheProcessOfAName(t *testing.T) {
	leaks(t)
	port := freePort(t)
	for before := range 3 {
		l := listenAt(t, port, Config{})
		if names := l.at.names(t, ""); len(names) != before+1 || !slices.Contains(names, l.name) {
			t.Fatalf("it is %s of %q", l.name, names)
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

// pingPong sends a message in each direction.
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

// A connection that is withdrawn before the accepting process has taken it is never taken. One that has
// been taken goes on.
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
	l.mu.Lock() // taking a connection needs this lock
	c, err := Dial(t.Context(), l.at.port, l.at.name, l.at.user, Config{})
	withdrawn := err == nil && c.(session.Withdrawer).Withdraw()
	l.mu.Unlock()
	if !withdrawn {
		t.Fatalf("not withdrawn, or not dialed: %v", err)
	}
	d, e := meet(t, l) // the next connection, which is taken after it
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

	x, y := meet(t, l)
	defer end(x)
	defer end(y)
	late = x.(*endpoint)
	late.local.v.Store(late.turn | stateWithdrawn | stateHeld)
	late.linkDied(errMessage)
	if p := newPeer(y); p.poll(&ev) || p.Err() != errPeerAborted {
		t.Errorf("the peer of one that was withdrawn in vain, whose link has failed: %v", p.Err())
	}
}

// If a link fails before the peer has taken a connection, the connection is not taken later: its dialer
// tries another link, and must not move by both.
func TestNotTakenBehindItsLink(t *testing.T) {
	leaks(t)
	l := listen(t, Config{})
	a, b := meet(t, l)
	defer end(a)
	defer end(b)
	l.mu.Lock() // taking a connection needs this lock
	c, err := Dial(t.Context(), l.at.port, l.at.name, l.at.user, Config{})
	if err == nil {
		c.(*endpoint).linkDied(errMessage)
	}
	l.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	defer abort(c)
	if err := c.Err(); !errors.Is(err, ErrLinkGone) {
		t.Errorf("its end is %v", err)
	}
	d, e := meet(t, l) // the next connection that is taken
	defer end(d)
	defer end(e)
	pingPong(t, newPeer(d), newPeer(e))
}

// The same if the link fails before the connection has started.
func TestLinkFailsBeforeTheBeginning(t *testing.T) {
	leaks(t)
	l := listen(t, Config{})
	a, b := meet(t, l)
	defer end(a)
	defer end(b)
	k := a.(*endpoint).link
	s, err := k.freshSlot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	e := newEndpoint(k, s, (s.turn.Load()+turnUnit)&turnMask)
	if code := k.attach(e); code != codeOK {
		t.Fatalf("not attached: %d", code)
	}
	defer end(e)
	e.linkDied(errMessage)
	e.begin()
	if err := e.Err(); !errors.Is(err, ErrLinkGone) || !e.local.gaveUp(e.turn) {
		t.Errorf("its end is %v, and its state %#x", err, e.local.v.Load())
	}
}

// After its link has failed in this process, an endpoint reads nothing more from the ring, and its error
// tells that messages may be lost. If the peer's process has ended, or the peer has aborted, the link
// has not failed in that sense: all that the peer has sent is read.
func TestLostByItsLink(t *testing.T) {
	leaks(t)
	l := listen(t, Config{})
	for name, tc := range map[string]struct {
		ends func(d, e *endpoint)
		lost bool
	}{
		"the link fails here":     {func(d, e *endpoint) { d.linkDied(errMessage) }, true},
		"the peer breaks a rule":  {func(d, e *endpoint) { d.violation(errMessage) }, true},
		"the peer's process ends": {func(d, e *endpoint) { d.linkDied(errPeerGone) }, false},
		"the peer aborts":         {func(d, e *endpoint) { e.Abort() }, false},
	} {
		a, b := meet(t, l)
		defer end(a)
		defer end(b)
		p, q := newPeer(a), newPeer(b)
		pingPong(t, p, q)
		q.send([]byte("the last"))
		tc.ends(a.(*endpoint), b.(*endpoint))
		var ev session.Event
		if came := p.poll(&ev); came == tc.lost {
			t.Errorf("%s: what was sent comes: %v", name, came)
		}
		if err := p.Err(); err == nil || errors.Is(err, session.ErrLost) != tc.lost {
			t.Errorf("%s: %v", name, err)
		}
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
		"nobody has the name":        {place{port, l.name[:len(l.name)-1] + "x", us}, session.ReasonNoListener},
		"no address":                 {place{port, strings.Repeat("@", 200), us}, session.ReasonProtocol},
		"it is to be another user's": {place{port, l.name, us + 1}, session.ReasonOwner},
	} {
		_, err := dial(tc.at, Config{})
		if wantReason(t, err, tc.reason); t.Failed() {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// The same name may exist in two network namespaces. Which one is used depends on the thread that
// listens or dials.
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
		runtime.LockOSThread() // never unlocked, so the thread ends with the goroutine
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			t.Error(err)
			return
		}
		_, err := dial(here.at, Config{})
		wantReason(t, err, session.ReasonNoListener)
		if names, err := Names(t.Context(), here.at.port, here.at.user, Config{}); len(names) != 0 || err != nil {
			t.Errorf("names of another namespace: %q, %v", names, err)
		}
		there, err := listenUnix(here.name)
		if err != nil {
			t.Error(err)
			return
		}
		defer there.Close()
		if names, err := Names(t.Context(), here.at.port, here.at.user, Config{}); !slices.Equal(names, []string{here.name}) {
			t.Errorf("names: %q, %v", names, err)
		}
		came := make(chan struct{})
		go func() {
			defer close(came)
			if c, err := there.AcceptUnix(); err != nil {
				t.Error(err)
			} else {
				c.Close()
			}
		}()
		if ep, err := dialOnce(here.at, Config{}); err == nil {
			t.Error("a connection to the listener of another namespace")
			end(ep)
		}
		there.SetDeadline(time.Now().Add(patience))
		<-came
	}()
	<-done
	if len(here.taken) > 0 {
		t.Error("a connection came from the other namespace")
	}
}
