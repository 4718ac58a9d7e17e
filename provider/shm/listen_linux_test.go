package shm

import (
	"errors"
	"net"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/provider/shm/internal/quota"
	"github.com/sanconn/san/session"
)

// A listener bounds the number of its links, and of those from each user, so that one user cannot keep
// others out.
func TestDialingProcessesAreBounded(t *testing.T) {
	right := memfd(t, halfSize(firstSlots), halfSeals, 0)
	const links = 8 * maxRefusing
	for name, full := range map[string]struct {
		user  quota.Holder
		links int64
	}{
		"of one user": {quota.Holder(os.Geteuid()), links / 2},
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

			// Neither silent dialers nor those that are being refused delay the others.
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

// When a listener is closed, the next one can take its name, also for a process that still has
// connections to the first.
func TestNameIsTakenAgainWhileConnectionsLive(t *testing.T) {
	leaks(t)
	l := listen(t, Config{})
	x, y := meet(t, l)
	a, b := newPeer(x), newPeer(y)
	defer end(b)
	defer end(a)
	l.Close()
	nameIsFree(t, l.at)
	next := listenAt(t, l.at.port, Config{})
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

// nameIsFree waits until a name is free again, because its socket is closed in the background.
func nameIsFree(t *testing.T, at place) {
	t.Helper()
	testenv.Eventually(t, patience, func() error {
		l, err := net.Listen("unixpacket", at.name)
		if err == nil {
			l.Close()
		}
		return err
	})
}

// The name of a process that has ended no longer exists, and its successor has another one.
func TestNameOfAProcessThatHasEnded(t *testing.T) {
	leaks(t)
	c := spawn(t, "echo", nil)
	p := dialChild(t, c, Config{})
	c.kill()
	next := listenAt(t, c.at.port, Config{})
	if names := c.at.names(t, ""); !slices.Equal(names, []string{next.name}) {
		t.Errorf("there are %q; %s has ended, and %s is the next", names, c.at.name, next.name)
	}
	_, err := dial(c.at, Config{})
	wantReason(t, err, session.ReasonNoListener)
	a, b := meet(t, next) // whether or not the end of the old link has been noticed
	end(a)
	end(b)
	var ev session.Event
	if p.poll(&ev) {
		t.Error("an event of the process that has ended")
	}
}

// Descriptors that processes have passed before they were accepted may take a minute to close. Close
// does not wait for them. Neither do connections that nobody has accepted, nor the name, however many
// listeners were closed like that.
func TestCloseWithLingeringSocketsInTheQueue(t *testing.T) {
	leaks(t)
	limits := startLimits
	limits.descriptors = closerThreads + mostWaiting
	withLimits(t, limits)
	release := make(chan struct{})
	defer close(release)
	us := accountOf(uint32(os.Geteuid()))
	for range closerThreads + mostWaiting + 1 {
		us.closeLater(func() { <-release })
	}
	for range closerThreads + 1 {
		l := listen(t, Config{})
		dialRaw(t, l) // a dialer after which no more are accepted
		fd := lingering(t)
		var queue []*rawPeer
		for range 3 {
			s := dialRaw(t, l)
			s.send(linkRequest(version, firstSlots), fd)
			queue = append(queue, s)
		}
		unix.Close(fd) // not the last reference, as it is in transit
		closed := make(chan error)
		go func() { closed <- l.Close() }()
		select {
		case err := <-closed:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(patience):
			t.Error("Close waits")
		}
		for _, s := range queue {
			s.awaitHangUp()
		}
		nameIsFree(t, l.at)
	}
}
