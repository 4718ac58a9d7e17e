package shm

import (
	"net"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
)

// Descriptors that are slow to close occupy only a few threads. They are charged to the user who has
// passed them, until that user may pass no more. Other users are not affected.
func TestDescriptorsThatAreSlowToClose(t *testing.T) {
	leaks(t)
	withLimits(t, startLimits)
	synctest.Test(t, testDescriptorsThatAreSlowToClose)
}

func testDescriptorsThatAreSlowToClose(t *testing.T) {
	slow, other := accountOf(1), accountOf(2)
	release := make(chan struct{})
	begun := make(chan struct{}, 2*mostWaiting)
	const many = closerThreads + mostWaiting + 1
	for range many {
		slow.closeLater(func() { begun <- struct{}{}; <-release })
	}
	for range closerThreads {
		<-begun
	}
	if n := held.descriptors.Used(); n != many {
		t.Errorf("%d descriptors count, want %d", n, many)
	}
	done := make(chan struct{})
	other.closeLater(func() { close(done) })
	<-done
	other.awaitClosing(nil)
	gone := make(chan struct{})
	close(gone)
	slow.awaitClosing(gone) // otherwise the next one would wait
	waited := make(chan struct{})
	go func() { slow.awaitClosing(nil); close(waited) }()
	synctest.Wait()
	select {
	case <-waited:
		t.Error("did not wait for room")
	case <-begun:
		t.Errorf("more than %d at once", closerThreads)
	default:
	}
	close(release)
	<-waited
	synctest.Wait()
	if n := held.descriptors.Used(); n > 0 {
		t.Errorf("%d descriptors still count", n)
	}
}

// lingering returns a TCP socket whose last close waits for a peer that does not read. The peer is
// closed at the end of the test.
func lingering(t *testing.T) int {
	t.Helper()
	little := net.ListenConfig{Control: func(_, _ string, rc syscall.RawConn) (err error) {
		rc.Control(func(s uintptr) { err = unix.SetsockoptInt(int(s), unix.SOL_SOCKET, unix.SO_RCVBUF, 1) })
		return err
	}}
	l, err := little.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	deaf, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { deaf.(*net.TCPConn).SetLinger(0); deaf.Close() })
	rc, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var fd, n int
	rc.Control(func(s uintptr) {
		if n, err = unix.Write(int(s), make([]byte, 1<<20)); err == nil {
			fd, err = unix.FcntlInt(s, unix.F_DUPFD_CLOEXEC, 0)
		}
	})
	if err != nil || n < 1<<16 { // with fewer, the peer might have received all of them
		t.Fatal(n, err)
	}
	c.(*net.TCPConn).SetLinger(60)
	return fd
}

// A peer passes sockets whose closing takes a minute: in place of a segment and of a doorbell, as more
// descriptors than a message may have, and in messages that nobody receives. Neither other dialers nor
// Close wait for them.
func TestLingeringSocketsHoldUpNobody(t *testing.T) {
	leaks(t)
	l := listen(t, Config{})
	var closers sync.WaitGroup
	t.Cleanup(closers.Wait)
	begun := time.Now()
	for i := range 4 * closerThreads {
		s := dialRaw(t, l)
		fd := lingering(t)
		switch i % 4 {
		case 0:
			s.send(linkRequest(version, firstSlots), fd, doorbellEnd(t))
		case 1:
			s.send(linkRequest(version, firstSlots), memfd(t, halfSize(firstSlots), halfSeals, 0), fd)
		case 2:
			s.handshake()
			s.send((&message{kind: msgSegment, number: firstSlots}).encode(), fd, fd, fd)
		case 3:
			s.handshake()
			s.send((&message{kind: 200}).encode(), fd) // ends the link
			s.send(connectTo(0), fd)
		}
		closers.Go(func() { unix.Close(fd) }) // if it is the last reference after all, this waits
	}
	servesOthers(t, l)
	closing := time.Now()
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	t.Logf("the attack took %v, Close %v", closing.Sub(begun), time.Since(closing))
	if d := time.Since(closing); d > patience/2 {
		t.Errorf("Close took %v", d)
	}
}
