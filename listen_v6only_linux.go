package san

import (
	"net"
	"syscall"
)

// v6only reports whether a TCP listener takes no IPv4, because of the network tcp6 or a
// hook. Older kernels do not report it of MPTCP sockets, which Go uses for listeners.
func v6only(tcp *net.TCPListener) bool {
	c, err := tcp.SyscallConn()
	on := 0
	if err == nil {
		c.Control(func(fd uintptr) { on, _ = syscall.GetsockoptInt(int(fd), syscall.IPPROTO_IPV6, syscall.IPV6_V6ONLY) })
	}
	return on != 0
}
