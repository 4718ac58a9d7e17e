package san

import (
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// isListening reports whether fd is a listener's socket.
func isListening(fd uintptr) (bool, error) {
	v, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ACCEPTCONN)
	return v == 1, err
}

// readable reports whether a socket has something to read: a listener's, a connection.
func readable(t testing.TB, s syscall.Conn) bool {
	t.Helper()
	c, err := s.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	c.Control(func(fd uintptr) { n, err = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0) })
	if err != nil {
		t.Fatal(err)
	}
	return n > 0
}

// setReuseAddr is what a dialer's hook may do to its socket.
func setReuseAddr(fd uintptr) error {
	return unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
}

// ownNetwork takes this thread to a network namespace with nothing but loopback.
func ownNetwork() error {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return err
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	lo, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	lo.SetUint16(unix.IFF_UP)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, lo)
}
