package sanproxy

import (
	"errors"
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// tcpClose is the state TCP_CLOSE, include/net/tcp_states.h.
const tcpClose = 7

// wasReset reports whether a connection was in fact reset, on which a Read has found the end of file,
// and to which this end can still write. On a SAN the Read itself returns the reset, unless another Read
// has.
func wasReset(c net.Conn) (reset bool) {
	s, ok := bottom(c).(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := s.SyscallConn()
	if err != nil {
		return false
	}
	// RawConn.Read, unlike Control, leaves a *sanconn.Conn on its carrier. The descriptor that it shows
	// for a SAN is not of a TCP socket, nor is that of a unix socket.
	err = raw.Read(func(fd uintptr) (done bool) {
		info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		reset = err == nil && info.State == tcpClose
		return true
	})
	return reset || errors.Is(err, syscall.ECONNRESET)
}
