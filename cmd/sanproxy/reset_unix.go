//go:build unix

package main

import (
	"cmp"
	"syscall"

	"golang.org/x/sys/unix"
)

// resetAtDeath is a net.Dialer's Control. It sets what sanproxy.Proxy sets of a connection that was
// made: behind that, the server could be sent the end of a stream by the end of this process.
func resetAtDeath(_, _ string, c syscall.RawConn) (err error) {
	controlled := c.Control(func(fd uintptr) {
		err = unix.SetsockoptLinger(int(fd), unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	})
	return cmp.Or(controlled, err)
}
