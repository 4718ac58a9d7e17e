//go:build unix

package main

import (
	"cmp"
	"syscall"

	"golang.org/x/sys/unix"
)

// resetAtDeath is the Control of a net.Dialer. sanproxy.Proxy sets the same once the connection is made.
// If this process ended before that, the kernel would send the server an end of the stream.
func resetAtDeath(_, _ string, c syscall.RawConn) (err error) {
	controlled := c.Control(func(fd uintptr) {
		err = unix.SetsockoptLinger(int(fd), unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	})
	return cmp.Or(controlled, err)
}
