package shm

import "net/netip"

// accepting is the answer to a connect, with the steps of dialing. The exchange comes last:
// the link sends the code that connect returns.
type accepting struct {
	listener      *Listener
	link          *link
	slot          *slot
	local, remote netip.AddrPort

	e *endpoint
}

// accept accepts a connection on a link, or returns the code that refuses it.
func (l *Listener) accept(k *link, s *slot, m *message, fds []int) uint8 {
	a := accepting{listener: l, link: k, slot: s, local: m.addr}
	located := false
	if !k.theirs.examine(func() { located = a.locate(fds) }) {
		return codeResources
	}
	if !located {
		return codeAddress
	}
	a.create()
	code := a.finish()
	if code != codeOK {
		a.e.discard()
	}
	return code
}

// locate finds out from the dialer's socket where the connection comes from, and reports
// whether it may come to this listener.
func (a *accepting) locate(fds []int) bool {
	if len(fds) != 1 {
		return false
	}
	var err error
	a.remote, err = boundAddr(fds[0])
	l := a.listener
	if err != nil || !unused(fds[0]) || netns(fds[0]) != l.netns || !l.reaches(a.local, a.remote) {
		return false
	}
	// Without namespace cookies, the dialer may be root in a namespace of its own.
	return l.netns != 0 || a.remote.Port() >= 1024
}

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

// finish hands the connection to Accept, or returns why not.
func (a *accepting) finish() (code uint8) {
	l := a.listener
	l.mu.Lock()
	defer l.mu.Unlock() // at the end, so that Close finds the connection
	switch {
	case l.done:
		return codeClosed
	case len(l.accepted) == cap(l.accepted):
		return codeResources // of those that wait none has negotiated: rule C7 does not apply
	}
	if code := a.link.attach(a.e); code != codeOK {
		return code
	}
	delete(l.handshakes, a.link.control.conn)      // the handshake is over, though acceptLink may not have noticed
	l.accepted <- accepted{a.e, a.local, a.remote} // never blocks: the only sender, under mu
	return codeOK
}
