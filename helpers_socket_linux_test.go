package san

import "golang.org/x/sys/unix"

// isListening reports whether fd is a listener's socket.
func isListening(fd uintptr) (bool, error) {
	v, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ACCEPTCONN)
	return v == 1, err
}
