package shm

import (
	"errors"
	"net"
	"os"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/session"
)

// Who waits for a listener of the same TCP socket has the next connection at that one's
// end, and holds nothing when it is closed before its turn.
func TestListenersStandInLine(t *testing.T) {
	leaks(t)
	tcp, l := listen(t, "127.0.0.1:0", Config{})
	var line []*Listener
	for range 3 {
		next, err := Listen(tcp, Config{TakeOver: true})
		if err != nil {
			t.Fatal(err)
		}
		defer next.Close()
		if err := next.Waiting(); !errors.Is(err, syscall.EADDRINUSE) || !errors.As(err, new(*session.Unavailable)) {
			t.Errorf("behind another: %v", err)
		}
		line = append(line, next)
	}
	line[1].Close() // its turn has not come
	for _, next := range []*Listener{line[0], line[2]} {
		x, y := meet(t, tcp, l)
		end(y)
		end(x)
		l.Close()
		if next == line[0] { // at the second place
			x, y = meet(t, tcp, next)
			end(y)
			end(x)
		}
		testenv.Eventually(t, patience, next.Waiting)
		l = next
	}
	x, y := meet(t, tcp, l)
	end(y)
	end(x)
}

// One restart follows another at once: whoever has begun to listen is found, though the
// process ahead has not moved up yet when that one begins.
func TestRestartsInARow(t *testing.T) {
	leaks(t)
	tcp, l := listen(t, "127.0.0.1:0", Config{})
	for range 5 {
		next, err := Listen(tcp, Config{TakeOver: true})
		if err != nil {
			t.Fatal(err)
		}
		defer next.Close()
		l.Close()
		x, y := meet(t, tcp, next)
		end(y)
		end(x)
		l = next
	}
}

// A dialer does not try a link again that has ended, though its process has not noticed yet.
func TestDialAfterTheEndOfALink(t *testing.T) {
	leaks(t)
	tcp, l := listen(t, "127.0.0.1:0", Config{})
	for range 20 {
		x, y := meet(t, tcp, l)
		l.mu.Lock()
		for k := range l.links {
			k.control.hangUp() // the dialing end finds out at its next packet, or when it is told
		}
		l.mu.Unlock()
		a, b := meet(t, tcp, l)
		for _, ep := range []session.Endpoint{a, b, x, y} {
			end(ep)
		}
	}
}

// A TCP socket of another user is not listened on: dialers believe its owner alone.
func TestListenOnAnotherUsersSocket(t *testing.T) {
	testenv.NeedRoot(t)
	leaks(t)
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer tcp.Close()
	c, err := tcp.(*net.TCPListener).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if e := c.Control(func(fd uintptr) { err = unix.Fchown(int(fd), os.Geteuid()+1, -1) }); e != nil || err != nil {
		t.Fatal(e, err)
	}
	l, err := Listen(tcp.(*net.TCPListener), Config{})
	var u *session.Unavailable
	if !errors.As(err, &u) || u.Reason != session.ReasonOwner {
		t.Errorf("got %v", err)
	}
	if err == nil {
		l.Close()
	}
}
