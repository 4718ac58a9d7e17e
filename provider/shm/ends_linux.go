package shm

import (
	"errors"
	"net/netip"
	"sync"
)

// ends are the addresses of a connection. As over TCP, there is one at a time between them.
type ends struct{ local, remote netip.AddrPort }

// openEnds are the connections that a listener has accepted, until they retire.
type openEnds struct {
	mu sync.Mutex
	by map[ends]opened // guarded by mu
}

type opened struct {
	e      *endpoint
	socket uint64 // that the dialer is bound to, by SO_COOKIE
}

// errEnds: the dialer has given up the socket that held the connection's address.
var errEnds = errors.New("its address is another connection's now")

// add adds a connection, unless one that is not over has the same ends by the same socket. If
// it has them by another socket, its dialer does not hold them any more, and it is ended.
func (o *openEnds) add(at ends, e *endpoint, socket uint64) bool {
	o.mu.Lock()
	old := o.by[at]
	over := old.e == nil || old.e.ended()
	ok := over || old.socket != socket
	if ok {
		if o.by == nil {
			o.by = make(map[ends]opened)
		}
		o.by[at] = opened{e, socket}
		e.whenRetired = func() { o.remove(at, e) }
	}
	o.mu.Unlock()
	if ok && !over {
		old.e.violation(errEnds)
	}
	return ok
}

func (o *openEnds) remove(at ends, e *endpoint) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.by[at].e == e {
		delete(o.by, at)
	}
}
