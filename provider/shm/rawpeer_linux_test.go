package shm

import (
	"context"
	"errors"
	"net"
	"os"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/session"
)

// A rawPeer is a peer that the test plays message by message, at a listener's name.
type rawPeer struct {
	t    *testing.T
	conn *net.UnixConn
}

func dialRaw(t *testing.T, l *served) *rawPeer {
	t.Helper()
	c, err := l.at.connect("")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(patience))
	return &rawPeer{t, c}
}

func (s *rawPeer) send(b []byte, fds ...int) {
	s.t.Helper()
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	if _, _, err := s.conn.WriteMsgUnix(b, oob, nil); err != nil && !errors.Is(err, syscall.EPIPE) && !errors.Is(err, syscall.ECONNRESET) {
		s.t.Fatal(err)
	}
}

// awaitHangUp waits until the listener closes the socket, and returns the last message that it sent
// before, if any.
func (s *rawPeer) awaitHangUp() (last message) {
	s.t.Helper()
	for {
		var m message
		fds, err := receive(s.conn, &m)
		closeAll(fds)
		if err != nil {
			if errors.Is(err, os.ErrDeadlineExceeded) {
				s.t.Fatal("the listener did not hang up")
			}
			return last
		}
		last = m
	}
}

// handshake makes the link, as a peer does that follows the protocol.
func (s *rawPeer) handshake() {
	s.t.Helper()
	s.send(linkRequest(version, firstSlots), halfToPass(s.t), doorbellEnd(s.t))
	var reply message
	fds, err := receive(s.conn, &reply)
	closeAll(fds)
	if err != nil || reply.kind != msgLinkReply || reply.code != codeOK || len(fds) != 2 {
		s.t.Fatalf("no link: %+v, %v, %d descriptors", reply, err, len(fds))
	}
}

// halfToPass returns the descriptor of half a first segment that nobody has mapped.
func halfToPass(t *testing.T) int {
	t.Helper()
	m, fd, err := newHalf(firstSlots, ownAccount(), false)
	if err != nil {
		t.Fatal(err)
	}
	m.unmap()
	t.Cleanup(func() { unix.Close(fd) })
	return fd
}

// linkRequest returns the message that requests a link.
func linkRequest(version, slots uint32) []byte {
	return (&message{kind: msgLink, version: version, number: slots}).encode()
}

// doorbellEnd returns an end of a doorbell to pass to a peer.
func doorbellEnd(t *testing.T) int {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeAll(fds[:]) })
	return fds[0]
}

// servesOthers checks that a well-behaved dialer is served at once.
func servesOthers(t *testing.T, l *served) {
	t.Helper()
	a, b := meet(t, l)
	end(b)
	end(a)
}

// connectTo returns the message that requests a connection in a slot.
func connectTo(slot uint32) []byte { return (&message{kind: msgConnect, number: slot}).encode() }

// connect requests a connection, and returns the listener's end.
func (s *rawPeer) connect(l *served, slot uint32) session.Endpoint {
	s.t.Helper()
	s.send(connectTo(slot))
	b, err := l.accept()
	if err != nil {
		s.t.Fatal(err)
	}
	return b
}

// serveName takes a name of a port, and calls serve for each process that connects.
func serveName(t *testing.T, serve func(*net.UnixConn)) place {
	t.Helper()
	port := freePort(t)
	name := prefixOf("", port) + "serves by hand"
	u, err := listenUnix(name)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := u.AcceptUnix()
			if err != nil {
				return
			}
			serve(c)
			c.Close()
		}
	}()
	t.Cleanup(func() { u.Close(); <-done })
	return place{port, name, uint32(os.Geteuid())}
}

// sendEmpty sends a message without a byte, but with descriptors. The calls of Go and x/sys would add a
// byte.
func (s *rawPeer) sendEmpty(fds ...int) {
	s.t.Helper()
	oob := unix.UnixRights(fds...)
	h := unix.Msghdr{Control: &oob[0]}
	h.SetControllen(len(oob))
	raw, err := s.conn.SyscallConn()
	if err != nil {
		s.t.Fatal(err)
	}
	var errno syscall.Errno
	if err := raw.Control(func(fd uintptr) {
		_, _, errno = unix.Syscall(unix.SYS_SENDMSG, fd, uintptr(unsafe.Pointer(&h)), unix.MSG_NOSIGNAL)
	}); err != nil || errno != 0 {
		s.t.Fatal(err, errno)
	}
}

// mostPassed is how many descriptors a message can have in Linux (SCM_MAX_FD).
const mostPassed = 253

// A message without a byte ends the link, and the descriptors that come with it are closed: before the
// handshake, after it, and at the dialing end.
func TestDescriptorsOfAnEmptyMessage(t *testing.T) {
	fds := make([]int, mostPassed)
	for i := range fds {
		fds[i] = 1
	}
	leaks(t)
	l := listen(t, Config{})
	s := dialRaw(t, l)
	s.sendEmpty(fds...)
	s.awaitHangUp()
	s = dialRaw(t, l)
	s.handshake()
	s.sendEmpty(fds...)
	s.awaitHangUp()

	conns, err := unixPair()
	if err != nil {
		t.Fatal(err)
	}
	defer conns[0].Close()
	(&rawPeer{t, conns[0]}).sendEmpty(fds...)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if k, err := dialLink(ctx, conns[1], uint32(os.Geteuid()), Config{}.withDefaults()); err == nil {
		k.teardown()
		t.Error("the answer was understood")
	}
}
