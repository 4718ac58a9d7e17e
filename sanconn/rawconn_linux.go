package sanconn

import (
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// What a RawConn shows is a pair of stream sockets, as callers use recv with MSG_PEEK as
// well as read. Two states need none of their own: nobody can change a pair in which there
// is nothing, or one whose other end is closed, by reading, so all connections of the
// process share these, and a connection has no descriptor.
var (
	nothing sharedSocket
	end     = sharedSocket{ended: true}
)

// showMost is how many bytes are shown at a time: more than the headers that programs look
// for at the beginning of a connection.
const showMost = 4 << 10

// sharedSocket is a socket that always shows the same. It is made when it is first needed,
// and never closed.
type sharedSocket struct {
	ended bool // the end of the stream; else nothing

	mu   sync.Mutex // guards made and fd; its system calls do not block
	made bool
	fd   int
}

func (s *sharedSocket) get() (fd int, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.made {
		return s.fd, nil
	}
	pair, err := socketPair()
	if err != nil {
		return -1, err
	}
	if s.ended {
		unix.Close(pair[1])
	}
	s.fd, s.made = pair[0], true
	return s.fd, nil
}

func (s *sharedSocket) show(f func(fd uintptr) (done bool)) (done bool, err error) {
	fd, err := s.get()
	if err != nil {
		return false, err
	}
	return f(uintptr(fd)), nil
}

func showNothing(f func(fd uintptr) (done bool)) (done bool, err error) { return nothing.show(f) }
func showEnd(f func(fd uintptr) (done bool)) (done bool, err error)     { return end.show(f) }

// showBytes shows the front of b, and returns how many bytes f has read.
func showBytes(b []byte, f func(fd uintptr) (done bool)) (n int, done bool, err error) {
	pair, err := socketPair()
	if err != nil {
		return 0, false, err
	}
	defer unix.Close(pair[0])
	defer unix.Close(pair[1])
	shown, err := unix.Write(pair[1], b[:min(len(b), showMost)])
	if err != nil {
		return 0, false, os.NewSyscallError("write", err)
	}
	done = f(uintptr(pair[0]))
	left, err := unix.IoctlGetInt(pair[0], unix.TIOCINQ)
	if err != nil {
		return 0, false, os.NewSyscallError("ioctl", err)
	}
	return shown - left, done, nil
}

func socketPair() (pair [2]int, err error) {
	pair, err = unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	return pair, os.NewSyscallError("socketpair", err)
}

// recv is a read from TCP that does not wait; peek: what it reads stays there.
func recv(fd int, b []byte, peek bool) (n int, err error) {
	flags := unix.MSG_DONTWAIT
	if peek {
		flags |= unix.MSG_PEEK
	}
	for len(b) > 0 {
		n, _, err = unix.Recvfrom(fd, b, flags)
		if err != unix.EINTR {
			return max(n, 0), err
		}
	}
	return 0, nil
}

// queued is how many bytes have come that were not read.
func queued(tcp *net.TCPConn) (n int) {
	if raw, err := tcp.SyscallConn(); err == nil {
		raw.Control(func(fd uintptr) { n, _ = unix.IoctlGetInt(int(fd), unix.TIOCINQ) })
	}
	return n
}
