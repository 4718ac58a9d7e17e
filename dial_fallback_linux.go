package san

import (
	"context"
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// netDialer is what dials TCP after a SAN did not serve. Where the program has chosen the
// port, an attempt on shm may have passed a socket that is bound to it to a process that is
// stopped, and that has it in its queue until it goes on. So that TCP need not wait for that
// (EADDRINUSE), both sockets may share the port: see boundSocket.abandon.
func (d *Dialer) netDialer(attempted bool) *net.Dialer {
	n := d.NetDialer
	local, ok := n.LocalAddr.(*net.TCPAddr)
	if !attempted || !ok || local == nil || local.Port == 0 {
		return &n
	}
	hook := d.control()
	n.Control = nil
	n.ControlContext = func(ctx context.Context, network, address string, c syscall.RawConn) error {
		if err := c.Control(shareAddress); err != nil || hook == nil {
			return err
		}
		return hook(ctx, network, address, c)
	}
	return &n
}

// shareAddress lets others that have it set bind the socket's address as well. Where that
// fails TCP reports that the address is in use.
func shareAddress(fd uintptr) {
	_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
}
