package sanproxy

import (
	"errors"
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// tcpClose is the state TCP_CLOSE, include/net/tcp_states.h.
const tcpClose = 7

// wasReset reports whether a connection whose end of file was read, and to which this end
// can still write, was in fact reset. On a SAN a Read returns that, if none did before.
func wasReset(c net.Conn) (reset bool) {
	s, ok := bottom(c).(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := s.SyscallConn()
	if err != nil {
		return false
	}
	// A look as of Read leaves a *sanconn.Conn where it is. What that shows of a SAN is no
	// TCP socket, and neither is a unix socket.
	err = raw.Read(func(fd uintptr) (done bool) {
		info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		reset = err == nil && info.State == tcpClose
		return true
	})
	return reset || errors.Is(err, syscall.ECONNRESET)
}
