package rawshm

import (
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// FindListener returns the inode number of the TCP socket that listens on a port.
func FindListener(port uint16) (inode uint32, err error) {
	const listen = "0A"
	for _, file := range []string{"/proc/self/net/tcp", "/proc/self/net/tcp6"} {
		table, err := os.ReadFile(file)
		if err != nil {
			return 0, err
		}
		for _, line := range strings.Split(string(table), "\n")[1:] {
			f := strings.Fields(line)
			if len(f) < 10 || f[3] != listen || !strings.HasSuffix(f[1], fmt.Sprintf(":%04X", port)) {
				continue
			}
			n, err := strconv.ParseUint(f[9], 10, 32)
			return uint32(n), err
		}
	}
	return 0, fmt.Errorf("nobody listens on port %d", port)
}

// Dial connects a socket to the rendezvous of a listener.
func Dial(inode uint32) (socket int, err error) {
	socket, err = unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return -1, err
	}
	name := fmt.Sprintf("@san-shm/%d/%08x", Version, inode)
	if err := unix.Connect(socket, &unix.SockaddrUnix{Name: name}); err != nil {
		unix.Close(socket)
		return -1, err
	}
	return socket, nil
}

// Bind returns a TCP socket that is bound to an address, to a free port of it if that is 0.
func Bind(at netip.AddrPort) (socket int, err error) {
	socket, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	if err := unix.Bind(socket, &unix.SockaddrInet4{Addr: at.Addr().As4(), Port: int(at.Port())}); err != nil {
		unix.Close(socket)
		return -1, err
	}
	return socket, nil
}
