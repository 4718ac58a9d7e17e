package shm

import (
	"errors"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"
)

// accepting is the answer to a connect, with the steps of dialing. The exchange comes last:
// the link sends the code that connect returns.
type accepting struct {
	listener      *Listener
	link          *link
	slot          *slot
	local, remote netip.AddrPort
	socket        uint64 // identifies the one that holds remote

	e *endpoint
}

// accept accepts a connection on a link, or returns the code that refuses it.
func (l *Listener) accept(k *link, s *slot, m *message, fds []int) (code uint8, rest []int) {
	a := accepting{listener: l, link: k, slot: s, local: m.addr}
	code = codeResources // if too much is looked at already
	k.theirs.examine(func() {
		if code = a.locate(fds); code == codeOK {
			// Here, and not by a goroutine of its own: closing a TCP socket that was never
			// connected waits for nothing, even if its dialer has closed it before. It lingers
			// only behind a FIN (sk_stream_wait_close, net/core/stream.c), nobody can hold
			// the lock of a socket at its last close, and TCP has no descriptors in its queue.
			// A peer that connects it in this very moment, and has it linger, holds one of
			// its user's few threads for looking, as with any other slow descriptor.
			closeAll(fds)
			fds = nil
		}
	})
	if code != codeOK {
		return code, fds
	}
	a.create()
	at := ends{a.local, a.remote}
	if !l.open.add(at, a.e, a.socket) {
		a.e.discard()
		return codeAddress, fds
	}
	code = a.finish()
	if code != codeOK {
		l.open.remove(at, a.e)
		a.e.discard()
	}
	return code, fds
}

// locate finds out from the dialer's socket where the connection comes from, and whether it
// may come to this listener.
func (a *accepting) locate(fds []int) (code uint8) {
	if len(fds) != 1 {
		return codeAddress
	}
	var err error
	a.remote, err = boundAddr(fds[0])
	l := a.listener
	if err != nil || !unused(fds[0]) || netns(fds[0]) != l.netns || !l.reaches(a.local, a.remote) {
		return codeAddress
	}
	if a.socket, err = unix.GetsockoptUint64(fds[0], unix.SOL_SOCKET, unix.SO_COOKIE); err != nil { // Linux 4.12
		return codeAddress
	}
	if l.netns == 0 && a.remote.Port() < 1024 {
		return codeAddress // without namespace cookies, the dialer may be root in a namespace of its own
	}
	switch err := l.found(a.remote, a.local); {
	case err == nil:
		return codeOK
	case errors.Is(err, errNotFound), errors.Is(err, errOtherListener), errors.Is(err, net.ErrClosed):
		return codeClosed // the dialer looks for the listener again
	}
	return codeAddress
}

// found reports why a TCP connect between the addresses would not reach this listener's
// socket, nil if it would: that may be bound to a device, or share its port. A dialer looks
// for itself, but it may not be what it should be, and sockets may have changed since.
func (l *Listener) found(from, to netip.AddrPort) error {
	o, err := l.diag.find(from, to)
	switch {
	case err != nil:
		return err
	case o.inode != l.inode:
		return errOtherListener
	case o.signed:
		return errSigned
	}
	return nil
}

var (
	errOtherListener = errors.New("shm: connects reach another socket")
	errSigned        = errors.New("shm: the socket takes signed segments (TCP_MD5SIG)")
)

// reaches reports whether a TCP connect between the addresses could have reached this
// listener, judging by its own address.
func (l *Listener) reaches(to, from netip.AddrPort) bool {
	return to.Port() == l.addr.Port() &&
		to.Addr().Is4() == from.Addr().Is4() &&
		!(l.cfg.V6Only && to.Addr().Is4()) &&
		(l.addr.Addr().IsUnspecified() || l.addr.Addr() == to.Addr()) &&
		l.cfg.served(to.Addr()) && l.cfg.served(from.Addr())
}

// create makes the endpoint in the slot that the dialer has taken.
func (a *accepting) create() { a.e = newEndpoint(a.link, a.slot, -1) }

// finish hands the connection to Serve's function or to Accept, or returns why not.
func (a *accepting) finish() (code uint8) {
	l := a.listener
	l.mu.Lock()
	take := l.take
	switch {
	case l.done:
		code = codeClosed
	case take == nil && len(l.accepted) == cap(l.accepted):
		code = codeResources // of those that wait none has negotiated: rule C7 does not apply
	default:
		code = a.link.attach(a.e)
	}
	if code == codeOK {
		delete(l.handshakes, a.link.control.conn) // the handshake is over, though acceptLink may not have noticed
		if take == nil {
			l.accepted <- accepted{a.e, a.local, a.remote} // never blocks: the only sender, under mu
		} else {
			l.taking.Add(1) // so that Close waits
		}
	}
	l.mu.Unlock() // not before, so that Close finds the connection
	if code == codeOK && take != nil {
		take(a.e, net.TCPAddrFromAddrPort(a.local), net.TCPAddrFromAddrPort(a.remote))
		l.taking.Done()
	}
	return code
}
