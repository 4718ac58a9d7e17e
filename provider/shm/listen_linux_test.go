package shm

import (
	"errors"
	"fmt"
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/provider/shm/internal/quota"
	"github.com/sanconn/san/session"
)

// A listener bounds its links, and those from each user so that one user cannot keep the
// others out.
func TestDialingProcessesAreBounded(t *testing.T) {
	right := memfd(t, halfSize(firstSlots), halfSeals, 0)
	const links = 8 * maxRefusing
	for name, full := range map[string]struct {
		user  quota.User
		links int64
	}{
		"of one user": {quota.User(os.Geteuid()), links / 2},
		"of all":      {1 << 30, links},
	} {
		t.Run(name, func(t *testing.T) {
			leaks(t)
			limits := startLimits
			limits.descriptors = links * linkDescriptors
			withLimits(t, limits)
			l := listen(t, Config{})
			held.descriptors.Charge(full.user, full.links*linkDescriptors)
			s := dialRaw(t, l)
			s.send(linkRequest(version, firstSlots), right, doorbellEnd(t))
			var m message
			if fds, err := receive(s.conn, &m); err != nil || len(fds) != 0 || m.kind != msgLinkReply || m.code != codeResources {
				closeAll(fds)
				t.Errorf("answered %+v, %v", m, err)
			}
			if fds, err := receive(s.conn, &m); err == nil {
				closeAll(fds)
				t.Errorf("then %+v, %v", m, err)
			}
			s.conn.Close()

			// Neither silent dialers nor those being declined hold up the rest.
			for range 2 * maxRefusing {
				s := dialRaw(t, l)
				defer s.conn.Close()
			}
			held.descriptors.Return(full.user, full.links*linkDescriptors)
			servesOthers(t, l)
		})
	}
}

func TestClosingTheListenerLeavesConnectionsAlone(t *testing.T) {
	leaks(t)
	l := listen(t, Config{})
	a, b := meet(t, l)
	l.Close()
	p, q := newPeer(a), newPeer(b)
	defer end(p)
	defer end(q)
	var ev session.Event
	if !p.send([]byte("hello")) || !q.poll(&ev) || string(ev.Msg) != "hello" {
		t.Errorf("the connection ended with the listener: %v", q.Err())
	}
	q.Drop()
	_, err := dial(l.at, Config{})
	wantReason(t, err, session.ReasonNoListener)
	if err := l.Close(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("a second Close: %v", err)
	}
}

// A name is a next listener's once its process has closed its own, also for a process that
// still has connections to the previous one.
func TestNameIsTakenAgainWhileConnectionsLive(t *testing.T) {
	leaks(t)
	l := listen(t, Config{})
	x, y := meet(t, l)
	a, b := newPeer(x), newPeer(y)
	defer end(b)
	defer end(a)
	l.Close()
	var next *served
	testenv.Eventually(t, patience, func() error { // the socket is closed in the background
		if next = listenAt(t, l.at.port, Config{}); next.number != 0 {
			next.Close()
			return fmt.Errorf("number %d", next.number)
		}
		return nil
	})
	for range 2 {
		x, y := meet(t, next)
		end(y)
		end(x)
	}
	var ev session.Event
	if !a.send([]byte("hello")) || !b.poll(&ev) || string(ev.Msg) != "hello" {
		t.Errorf("the connection of before: %v", b.Err())
	}
	b.Drop()
}

// The name of a process that has ended is free, and dialers that knew it find its successor.
func TestNameOfAProcessThatHasEnded(t *testing.T) {
	leaks(t)
	c := spawn(t, "echo", nil)
	p := dialChild(t, c, Config{})
	c.kill()
	next := listenAt(t, c.at.port, Config{})
	if next.number != c.at.number {
		t.Errorf("number %d, and it was %d", next.number, c.at.number)
	}
	a, b := meet(t, next) // whether the old link's end has been noticed or not
	end(a)
	end(b)
	var ev session.Event
	if p.poll(&ev) {
		t.Error("an event of the process that has ended")
	}
}

// What a process has passed before it was accepted may take a minute to close. Close does not
// wait for it.
func TestCloseWithALingeringSocketInTheQueue(t *testing.T) {
	leaks(t)
	var took time.Duration
	for range 5 { // on a busy machine, Close may take long for nothing
		port := freePort(t)
		l, err := Listen(port, Config{}) // it accepts nobody
		if err != nil {
			t.Fatal(err)
		}
		s := dialRaw(t, &served{Listener: l, at: place{port, l.number, uint32(os.Geteuid())}})
		fd := lingering(t)
		s.send(linkRequest(version, firstSlots), fd)
		unix.Close(fd)
		begun := time.Now()
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		if took = time.Since(begun); took < 500*time.Millisecond {
			return
		}
	}
	t.Errorf("Close took %v", took)
}

// Every process of a port has its own number, as long as there are any.
func TestNumbersAreBounded(t *testing.T) {
	leaks(t)
	port := freePort(t)
	for number := range Numbers {
		l, err := Listen(port, Config{})
		if err != nil || l.number != number {
			t.Fatalf("the listener before which there were %d: %v", number, err)
		}
		defer l.Close()
	}
	_, err := Listen(port, Config{})
	wantReason(t, err, session.ReasonResources)
}
