package shm

import (
	"errors"
	"net"
	"os"
	"syscall"
	"testing"

	"github.com/sanconn/san/session"
)

// A listener bounds its links, and those from each user so that one user cannot keep the
// others out.
func TestDialingProcessesAreBounded(t *testing.T) {
	right := memfd(t, segmentSize(firstSlots), segmentSeals, 0)
	const links = 8 * maxRefusing
	for name, full := range map[string]struct {
		user  uint32
		links int64
	}{
		"of one user": {uint32(os.Geteuid()), links / 2},
		"of all":      {1 << 30, links},
	} {
		t.Run(name, func(t *testing.T) {
			leaks(t)
			limits := startLimits
			limits.Descriptors = links * linkDescriptors
			withLimits(t, limits)
			tcp, l := listen(t, "127.0.0.1:0", Config{})
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
			servesOthers(t, tcp, l)
		})
	}
}

func TestRendezvousThatIsTaken(t *testing.T) {
	leaks(t)
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer tcp.Close()
	serveRendezvous(t, tcp, func(*net.UnixConn) {})
	_, err = Listen(tcp.(*net.TCPListener), Config{})
	var u *session.Unavailable
	if !errors.As(err, &u) || u.Reason != session.ReasonOwner {
		t.Errorf("got %v", err)
	}
}

func TestClosingTheListenerLeavesConnectionsAlone(t *testing.T) {
	leaks(t)
	tcp, l := listen(t, "127.0.0.1:0", Config{})
	a, b := meet(t, tcp, l)
	waiting, err := dial(tcp.Addr(), Config{})
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	p, q, w := newPeer(a), newPeer(b), newPeer(waiting)
	defer end(p)
	defer end(q)
	defer end(w)
	var ev session.Event
	if !p.send([]byte("hello")) || !q.poll(&ev) || string(ev.Msg) != "hello" {
		t.Errorf("the connection ended with the listener: %v", q.Err())
	}
	q.Drop()
	if w.poll(&ev) || !errors.Is(w.Err(), syscall.EPIPE) { // in order: a reset is a refusal
		t.Errorf("a connection that nobody accepted finds %v", w.Err())
	}
	_, err = dial(tcp.Addr(), Config{})
	var u *session.Unavailable
	if !errors.As(err, &u) || u.Reason != session.ReasonNoListener {
		t.Errorf("a dial after Close: %v", err)
	}
	if _, _, _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Accept after Close: %v", err)
	}
	tcp.Close()
	if _, err = dial(tcp.Addr(), Config{}); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("a dial after the TCP listener's Close: %v", err)
	}
}

// A listener that takes over another's socket gets the dials of a process that still has
// connections to the previous one.
func TestListenerTakesOverWhileConnectionsLive(t *testing.T) {
	leaks(t)
	tcp, l := listen(t, "127.0.0.1:0", Config{})
	x, y := meet(t, tcp, l)
	a, b := newPeer(x), newPeer(y)
	defer end(b)
	defer end(a)
	l.Close()
	next, err := Listen(tcp, Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer next.Close()
	for range 2 {
		x, y := meet(t, tcp, next)
		end(y)
		end(x)
	}
	var ev session.Event
	if !a.send([]byte("hello")) || !b.poll(&ev) || string(ev.Msg) != "hello" {
		t.Errorf("the connection of before: %v", b.Err())
	}
	b.Drop()
}
