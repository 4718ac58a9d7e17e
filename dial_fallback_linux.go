package san

import (
	"context"
	"errors"
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// netDialer is what dials TCP after a SAN did not serve. Where the program has chosen the
// port, an attempt on shm may have passed a socket that is bound to it to a process that is
// stopped, and that has it in its queue until it goes on. So that TCP need not wait for that
// (EADDRINUSE), both sockets may share the port: see boundSocket.abandon.
func (d *Dialer) netDialer() *net.Dialer {
	n := d.NetDialer
	if local, ok := n.LocalAddr.(*net.TCPAddr); ok && local.Port != 0 {
		hook := d.control()
		n.Control = nil
		n.ControlContext = func(ctx context.Context, network, address string, c syscall.RawConn) error {
			var err error
			if e := c.Control(func(fd uintptr) { err = shareAddress(int(fd)) }); e != nil || err != nil {
				return errors.Join(e, err)
			}
			if hook == nil {
				return nil
			}
			return hook(ctx, network, address, c)
		}
	}
	return &n
}

func shareAddress(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) }
