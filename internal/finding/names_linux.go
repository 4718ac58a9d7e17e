package finding

import (
	"net/netip"
	"sync"
	"time"

	"github.com/sanconn/san/internal/reason"
	"github.com/sanconn/san/provider/shm"
	"github.com/sanconn/san/session"
)

// Place is where the processes that accept connections on a port have their names.
type Place struct {
	Dir       string         // the directory of the names; "": they are in the network namespace
	Namespace uint64         // the kernel's number of the network namespace; 0: not known, or there is a directory
	Peer      netip.AddrPort // the port; for a search in a directory, whose network namespaces may all use the port, with the address
}

// Here returns the place of a port in a network namespace.
func Here(namespace uint64, port uint16) Place {
	return Place{Namespace: namespace, Peer: netip.AddrPortFrom(netip.Addr{}, port)}
}

// own is the set of this process's names: one for each port of a network namespace, however many
// listeners and connections use it, and one more in the directory.
var own = nameSet{names: make(map[Place]*name), listen: shm.Listen}

type nameSet struct {
	mu    sync.Mutex // guards names, and the lower fields of each name; not held while a name is made: a directory may hang
	names map[Place]*name

	listen func(port uint16, cfg shm.Config, take func(session.Endpoint)) (*shm.Listener, error) // shm.Listen, except in tests
}

// take handles an endpoint by which another process may propose to move a connection. outside means
// that the other process has to be in another network namespace.
type take = func(ep session.Endpoint, outside bool, cfg session.Config)

// name is a name of this process, or one that it could not get yet: without descriptors, or in a
// directory that is full or fails, the process tries again every againIn.
type name struct {
	at        Place
	namespace uint64 // of the thread that used the name first; it may not be the process's
	cfg       session.Config
	take      take
	known     chan struct{} // closed after the first attempt

	// The set's mu guards the fields below.
	users    int
	making   bool
	listener *shm.Listener // nil: the process does not have the name now
	lack     error         // why not, after an attempt has failed
	tried    time.Time     // when the last attempt ended
}

// againIn is how long after a failed attempt the next one may be made.
const againIn = time.Second

// Names is the use of a process's names by one listener or accepted connection.
type Names struct { // one for each accepted connection, so it is small
	here, there *name // there: the name in the directory, or nil
	Outside     error // why processes of other network namespaces do not find this process
}

// Open lets other processes find this one for connections to a port, at here and, if dir is not empty,
// in that directory, until Close. take handles the endpoints by which they connect, and gets cfg. It
// must not block. Of several calls for a port, the take and cfg of the first one are used for all.
func Open(here Place, dir string, cfg session.Config, take take) (*Names, error) {
	n := &Names{here: own.use(here, cfg, take)}
	if why, _ := n.Lacks(); why != nil && !reason.Is(why, session.ReasonResources) {
		n.Close()
		return nil, why
	}
	if dir != "" {
		n.there = own.use(Place{Dir: dir, Peer: here.Peer}, cfg, take)
	}
	return n, nil
}

// Lacks returns why this process is not found now, or nil if it is. all: no process finds it; otherwise
// those of its own network namespace do.
func (n *Names) Lacks() (why error, all bool) {
	own.mu.Lock()
	defer own.mu.Unlock()
	switch {
	case n.here.lack != nil:
		return n.here.lack, true
	case n.there != nil && n.there.lack != nil:
		return n.there.lack, false
	}
	return n.Outside, false
}

// Close ends the use of the names.
func (n *Names) Close() error {
	for _, name := range []*name{n.here, n.there} {
		if name != nil {
			own.release(name)
		}
	}
	return nil
}

// has reports whether the process has its name at a place.
func (n *nameSet) has(at Place) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	x := n.names[at]
	return x != nil && x.listener != nil
}

// use adds a user to the process's name at a place, and makes the name if the process does not have it.
// When use returns, the first attempt to make the name has ended. In a directory, which may hang, this
// is true for the first caller only.
func (n *nameSet) use(at Place, cfg session.Config, take take) *name {
	n.mu.Lock()
	x := n.names[at]
	first := x == nil
	if first {
		x = &name{at: at, namespace: shm.NetworkNamespace(), cfg: cfg, take: take, known: make(chan struct{})}
		n.names[at] = x
	}
	x.users++
	has := x.listener != nil
	n.mu.Unlock()
	switch {
	case has:
	case first:
		n.make(x)
		close(x.known)
	case at.Dir == "":
		<-x.known
		n.make(x)
	default:
		go n.make(x)
	}
	return x
}

// make tries to make a name, if no attempt is running and againIn has passed. A name in a network
// namespace is made only by a thread of that namespace. Timers run on threads of the process's own one.
func (n *nameSet) make(x *name) {
	n.mu.Lock()
	due := x.users > 0 && x.listener == nil && !x.making && time.Since(x.tried) >= againIn &&
		(x.at.Dir != "" || shm.NetworkNamespace() == x.namespace)
	x.making = x.making || due
	n.mu.Unlock()
	if !due {
		return
	}
	l, err := n.listen(x.at.Peer.Port(), shm.Config{Dir: x.at.Dir}, func(ep session.Endpoint) {
		x.take(ep, x.at.Dir != "", x.cfg)
	})
	n.mu.Lock()
	defer n.mu.Unlock()
	x.making, x.listener, x.lack, x.tried = false, l, err, time.Now()
	switch {
	case x.users == 0 && l != nil:
		go l.Close()
	case reason.Is(err, session.ReasonResources, session.ReasonUnreachable, session.ReasonTimeout):
		time.AfterFunc(againIn, func() { n.make(x) })
	}
}

// release removes a user of a name. With the last user the name goes.
func (n *nameSet) release(x *name) {
	n.mu.Lock()
	x.users--
	last, l := x.users == 0, x.listener
	if last {
		delete(n.names, x.at)
	}
	n.mu.Unlock()
	if last && l != nil {
		l.Close() // the port's next listener has another name
	}
}
