package rawshm

import (
	"fmt"
	"os"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// names has the name that was last found for each port.
var names sync.Map // by uint16

// Prefix returns the beginning of the names of processes that accept connections to a TCP port.
func Prefix(port uint16) string { return fmt.Sprintf("@san-shm/%d/%d/", Version, port) }

// Dial connects a socket to a process that accepts connections to a TCP port: to the first process
// found, of any user, as only one has a name in these tests.
func Dial(port uint16) (socket int, err error) {
	name, ok := names.Load(port)
	if !ok {
		sockets, err := os.ReadFile("/proc/thread-self/net/unix")
		if err != nil {
			return -1, err
		}
		_, line, ok := strings.Cut(string(sockets), " "+Prefix(port))
		if !ok {
			return -1, unix.ECONNREFUSED
		}
		number, _, _ := strings.Cut(line, "\n")
		name = Prefix(port) + number
		names.Store(port, name)
	}
	socket, err = unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return -1, err
	}
	if err = unix.SetsockoptInt(socket, unix.SOL_SOCKET, unix.SO_PASSCRED, 1); err == nil {
		err = unix.Connect(socket, &unix.SockaddrUnix{Name: name.(string)})
	}
	if err != nil {
		unix.Close(socket)
		return -1, err
	}
	return socket, nil
}
