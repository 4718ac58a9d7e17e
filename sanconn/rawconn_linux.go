package sanconn

import (
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// sharedSocket is a socket that always shows the same, because no read changes that. So all connections
// of the process share it. It is made at its first use, and never closed.
type sharedSocket struct {
	ended bool // shows the end of a stream; else nothing

	mu   sync.Mutex // guards the fields below; system calls with it held do not block
	made bool
	pair [2]int
}

var (
	nothing sharedSocket
	end     = sharedSocket{ended: true}
)

// show calls f with the socket.
func (s *sharedSocket) show(f func(fd uintptr) (done bool)) (done bool, err error) {
	s.mu.Lock()
	if !s.made {
		s.pair, err = socketPair()
		if s.made = err == nil; s.made && s.ended {
			unix.Close(s.pair[1])
		}
	}
	s.mu.Unlock()
	if err != nil {
		return false, err
	}
	return f(uintptr(s.pair[0])), nil
}

func socketPair() (pair [2]int, err error) {
	pair, err = unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	return pair, os.NewSyscallError("socketpair", err)
}

// showBytes calls f with a socket of its own that has these bytes, or as many as fit, and returns how
// many f has taken.
func showBytes(b []byte, f func(fd uintptr) (done bool)) (took int, done bool, err error) {
	pair, err := socketPair()
	if err != nil {
		return 0, false, err
	}
	defer unix.Close(pair[0])
	defer unix.Close(pair[1])
	n, err := unix.Write(pair[1], b)
	if err != nil {
		return 0, false, os.NewSyscallError("write", err)
	}
	done = f(uintptr(pair[0]))
	left, err := unix.IoctlGetInt(pair[0], unix.TIOCINQ)
	return n - left, done, os.NewSyscallError("ioctl", err)
}

// waits reports whether a read (POLLIN) or a write (POLLOUT) would have to wait. It does not try one: a
// read would take a reset from the socket, and the next Read would find the end instead.
func waits(fd int, event int16) bool {
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: event}}, 0)
		if err != unix.EINTR {
			return n == 0 && err == nil
		}
	}
}

func nothingIn(fd int) bool { return waits(fd, unix.POLLIN) }

// queued returns how many unread bytes have come.
func queued(tcp *net.TCPConn) (n int) {
	if raw, err := tcp.SyscallConn(); err == nil {
		raw.Control(func(fd uintptr) { n, _ = unix.IoctlGetInt(int(fd), unix.TIOCINQ) })
	}
	return n
}

// resetsAtClose reports whether SO_LINGER is on, with a time of 0.
func resetsAtClose(tcp *net.TCPConn) (is bool) {
	if raw, err := tcp.SyscallConn(); err == nil {
		raw.Control(func(fd uintptr) {
			l, err := unix.GetsockoptLinger(int(fd), unix.SOL_SOCKET, unix.SO_LINGER)
			is = err == nil && l.Onoff != 0 && l.Linger == 0
		})
	}
	return is
}
