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

// A rawPeer is a peer that the test plays by hand, at a listener's rendezvous.
type rawPeer struct {
	t    *testing.T
	conn *net.UnixConn
}

func dialRaw(t *testing.T, l *Listener) *rawPeer {
	t.Helper()
	name := rendezvous(l.inode, first)
	c, err := net.DialUnix(name.Net, nil, name)
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

// hungUp waits for the listener to close the socket, and returns the last
// message that it sent before, if any.
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

// handshake makes the link, as a peer does that keeps to the protocol.
func (s *rawPeer) handshake() {
	s.t.Helper()
	m, fd, err := newSegment(firstSlots)
	if err != nil {
		s.t.Fatal(err)
	}
	m.unmap()
	defer unix.Close(fd)
	s.send(linkRequest(version, firstSlots), fd, doorbellEnd(s.t))
	var reply message
	fds, err := receive(s.conn, &reply)
	closeAll(fds)
	if err != nil || reply.kind != msgLinkReply || reply.code != codeOK || len(fds) != 1 {
		s.t.Fatalf("no link: %+v, %v, %d descriptors", reply, err, len(fds))
	}
}

// linkRequest is the message that asks for a link.
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

// stillServes checks that a well-behaved dialer is served at once.
func servesOthers(t *testing.T, tcp net.Listener, l *Listener) {
	t.Helper()
	a, b := meet(t, tcp, l)
	end(b)
	end(a)
}

// asks returns the message that asks a listener for a connection in a slot.
func connectTo(tcp net.Listener, slot uint32) []byte {
	return (&message{kind: msgConnect, number: slot, addr: tcp.Addr().(*net.TCPAddr).AddrPort()}).encode()
}

// connect asks for a connection and returns the listener's end.
func (s *rawPeer) connect(l *Listener, ask []byte, bound int) session.Endpoint {
	s.t.Helper()
	s.send(ask, bound)
	var m message
	if _, err := receive(s.conn, &m); err != nil || m.kind != msgConnectReply || m.code != codeOK {
		s.t.Fatalf("answered %+v, %v", m, err)
	}
	b, _, _, err := l.Accept()
	if err != nil {
		s.t.Fatal(err)
	}
	return b
}

// squat listens at the rendezvous of a plain TCP listener and calls serve for each
// process that connects.
func serveRendezvous(t *testing.T, tcp net.Listener, serve func(*net.UnixConn)) {
	t.Helper()
	name := rendezvousOf(t, tcp)
	u, err := net.ListenUnix(name.Net, name)
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
}

func rendezvousOf(t *testing.T, tcp net.Listener) *net.UnixAddr {
	t.Helper()
	rc, err := tcp.(*net.TCPListener).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var inode uint32
	rc.Control(func(fd uintptr) { inode, err = socketInode(int(fd)) })
	if err != nil {
		t.Fatal(err)
	}
	return rendezvous(inode, first)
}

// sendEmpty sends a message without a byte, but with descriptors. Go's and x/sys's calls
// would add a byte.
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

// A message without a byte ends the link, and the descriptors that it brings are closed:
// ahead of the handshake, behind it, and at the dialing end.
func TestDescriptorsOfAnEmptyMessage(t *testing.T) {
	fds := make([]int, roomFDs)
	for i := range fds {
		fds[i] = 1
	}
	leaks(t)
	_, l := listen(t, "127.0.0.1:0", Config{})
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
		k.release()
		t.Error("the answer was understood")
	}
}
