package sanproxy

import (
	"net"

	"golang.org/x/sys/unix"
)

// tcpClose is the state TCP_CLOSE, include/net/tcp_states.h.
const tcpClose = 7

// wasReset reports whether a TCP connection whose end of file was read, and to which this end
// can still write, was in fact reset.
func wasReset(c net.Conn) (reset bool) {
	tcp, ok := bottom(c).(*net.TCPConn)
	if !ok {
		return false
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return false
	}
	raw.Control(func(fd uintptr) {
		info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		reset = err == nil && info.State == tcpClose
	})
	return reset
}
