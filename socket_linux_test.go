package san

import "golang.org/x/sys/unix"

// isListening asks the system whether fd is a listener's socket.
func isListening(fd uintptr) (bool, error) {
	v, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ACCEPTCONN)
	return v == 1, err
}

// setReuseAddr is what a dialer's hook may do to its socket.
func setReuseAddr(fd uintptr) error {
	return unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
}
