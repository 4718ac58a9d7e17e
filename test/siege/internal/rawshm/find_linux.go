package rawshm

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// Dial connects a socket to a process that accepts connections to a TCP port: to the one that
// has the port's name of a number.
func Dial(port uint16, number int) (socket int, err error) {
	socket, err = unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return -1, err
	}
	if err = unix.SetsockoptInt(socket, unix.SOL_SOCKET, unix.SO_PASSCRED, 1); err == nil {
		err = unix.Connect(socket, &unix.SockaddrUnix{Name: fmt.Sprintf("@san-shm/%d/%d/%d", Version, port, number)})
	}
	if err != nil {
		unix.Close(socket)
		return -1, err
	}
	return socket, nil
}
