package finding

import (
	"net/netip"
	"sync"
	"time"

	"github.com/sanconn/san/internal/reason"
	"github.com/sanconn/san/provider/shm"
	"github.com/sanconn/san/session"
)

// Place is where the processes that accept connections of a port have their names.
type Place struct {
	Dir       string         // "": in the network namespace
	Namespace uint64         // the kernel's number of that, 0: not known; or, in a directory, 0
	Peer      netip.AddrPort // without the address in a network namespace, which all processes share
}

// Here is the place of a port in a network namespace.
func Here(namespace uint64, port uint16) Place {
	return Place{Namespace: namespace, Peer: netip.AddrPortFrom(netip.Addr{}, port)}
}

// own are the names of this process: for each port of a network namespace one, however many listeners
// and connections use it, and one more in the directory.
var own = nameSet{names: make(map[Place]*name), listen: shm.Listen}

type nameSet struct {
	mu    sync.Mutex // guards names, and of each what says so. Names are made without it: a directory may hang
	names map[Place]*name

	listen func(port uint16, cfg shm.Config, take func(session.Endpoint)) (*shm.Listener, error) // shm's
}

// take takes an endpoint by which another process may propose to move a connection. outside: it is to
// be of another network namespace.
type take = func(ep session.Endpoint, outside bool, cfg session.Config)

// name is one that this process has, or will have: while descriptors, or a directory's
// room, are used up, or its file system fails, it tries again once in a while.
type name struct {
	at        Place
	namespace uint64 // of the thread that asked for it first, which may not be the process's
	cfg       session.Config
	take      take
	known     chan struct{} // closed when the first use of it has tried

	// The set's mu guards what follows.
	users    int
	making   bool
	listener *shm.Listener // nil: it does not have it
	lack     error         // why not, once that is known
	tried    time.Time     // when it has been tried last
}

// againIn is when a name is tried again.
const againIn = time.Second

// Names is the use of the names by which a process is found for an address.
type Names struct { // of each accepted connection, so it holds little
	here, there *name // there: in the directory, or nil
	Outside     error // why those of other network namespaces do not find this process
}

// Open has other processes find this one for connections to a port (Here), and if dir is not empty
// there as well, until Close. take gets the endpoints by which they come, and cfg; it must not block,
// and of several calls for a port the first one's count for all.
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

// Lacks returns why it is not found now, nil: it is. all: by nobody, or else by none of other
// network namespaces.
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

// Close gives the names up.
func (n *Names) Close() error {
	for _, name := range []*name{n.here, n.there} {
		if name != nil {
			own.release(name)
		}
	}
	return nil
}

// has reports whether the process is found at a place.
func (n *nameSet) has(at Place) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	x := n.names[at]
	return x != nil && x.listener != nil
}

// use takes a name, unless the process has it, until release. When it returns it is known whether the
// process has it; but in a directory, which may hang, that is so for the first use alone.
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

// make makes a name, if it is time. One that is not in the directory is one of the calling thread's
// network namespace: no thread of another one makes it. Timers run on threads of the process's.
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

// release gives a name up with its last use.
func (n *nameSet) release(x *name) {
	n.mu.Lock()
	x.users--
	last, l := x.users == 0, x.listener
	if last {
		delete(n.names, x.at)
	}
	n.mu.Unlock()
	if last && l != nil {
		l.Close() // the next one of the port has another name
	}
}
