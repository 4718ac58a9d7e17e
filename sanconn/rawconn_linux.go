package sanconn

import (
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// nothing is a socket that shows what a connection has to which nothing has come. As nobody can
// change that by reading, all connections of the process share it. It is made when it is first
// needed, and never closed.
var nothing struct {
	mu   sync.Mutex // guards what follows; its system calls do not block
	made bool
	pair [2]int
}

// showNothing calls f with a socket in which there is nothing.
func showNothing(f func(fd uintptr) (done bool)) (done bool, err error) {
	nothing.mu.Lock()
	if !nothing.made {
		nothing.pair, err = unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		nothing.made = err == nil
	}
	fd := nothing.pair[0]
	nothing.mu.Unlock()
	if err != nil {
		return false, os.NewSyscallError("socketpair", err)
	}
	return f(uintptr(fd)), nil
}

// nothingIn reports whether a read would have to wait.
func nothingIn(fd int) bool {
	var b [1]byte
	for {
		_, _, err := unix.Recvfrom(fd, b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
		if err != unix.EINTR {
			return err == unix.EAGAIN
		}
	}
}

// queued is how many bytes have come that were not read.
func queued(tcp *net.TCPConn) (n int) {
	if raw, err := tcp.SyscallConn(); err == nil {
		raw.Control(func(fd uintptr) { n, _ = unix.IoctlGetInt(int(fd), unix.TIOCINQ) })
	}
	return n
}
