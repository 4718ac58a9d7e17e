package san

import "net"

// Adopt makes a Listener of a TCP listener that exists, such as one that the process was
// given: systemd's, tableflip's, net.FileListener's. NetListenConfig is not used. On
// success tcp belongs to the Listener, whose Close closes it: do not use it any more.
// On an error it is still the caller's; the errors are those of Listen.
//
// Another process may hold the same socket, and have adopted it too: the one that this
// process takes over from. Until that one closes its Listener or ends, SAN connections go
// to it, and Unavailable has the reason of each provider that waits for that. TCP
// connections go to whichever of the two calls Accept first. At the change no dial is
// refused: over shm the next connection goes to this process; over verbs they go by TCP
// until this process has noticed, which takes some 100 ms.
//
// It waits for up to 0.3 s where two others hold the socket, of which the first may just
// have ended. For the process that ends, see Listener.Close.
func (lc *ListenConfig) Adopt(tcp *net.TCPListener) (*Listener, error) {
	if err := isOpen(tcp); err != nil {
		return nil, listenError("tcp", nil, err)
	}
	o, err := lc.opening()
	if err != nil {
		return nil, listenError("tcp", tcp.Addr(), err)
	}
	o.settings.takeOver = true
	o.settings.zone = tcp.Addr().(*net.TCPAddr).Zone
	l, err := o.beside(tcp, false)
	if err != nil {
		return nil, listenError("tcp", tcp.Addr(), err)
	}
	l.shared.Store(true)
	return l, nil
}

// isOpen returns why there is no TCP listener: it is nil or closed.
func isOpen(tcp *net.TCPListener) error {
	c, err := tcp.SyscallConn()
	if err != nil {
		return err
	}
	return c.Control(func(uintptr) {})
}
