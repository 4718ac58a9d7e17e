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
	Dir  string         // "": in this network namespace
	Peer netip.AddrPort // without the address in this network namespace, which all processes share
}

// Here is the place of a port in this network namespace.
func Here(port uint16) Place { return Place{Peer: netip.AddrPortFrom(netip.Addr{}, port)} }

// own are the names of this process: for each port one, however many listeners and connections use
// it, and one more in the directory.
var own = nameSet{names: make(map[Place]*name)}

type nameSet struct {
	mu    sync.Mutex // guards what follows, and the making of names
	names map[Place]*name
}

// Taken is an endpoint by which another process may propose to move a connection.
type Taken struct {
	session.Endpoint
	User    uint32 // whose the process is, unless Outside
	Outside bool   // it is to be of another network namespace
}

// name is one that this process has, or will have: while descriptors or the port's numbers
// are used up, it tries again once in a while.
type name struct {
	at        Place
	namespace uint64 // of the thread that asked for it first, which may not be the process's
	cfg       session.Config
	take      func(Taken, session.Config)

	// The set's mu guards what follows.
	users    int
	listener *shm.Listener
	lack     error     // why it does not have it yet; nil: it has
	tried    time.Time // when it has been tried last
}

// againIn is when a name is tried again.
const againIn = time.Second

// Names is the use of the names by which a process is found for an address.
type Names struct { // of each accepted connection, so it holds little
	here, there *name // there: in the directory, or nil
	Outside     error // why those of other network namespaces do not find this process
}

// Open has other processes find this one for connections to a port, and if dir is not empty there
// as well, until Close. take gets the endpoints by which they come, and cfg; it must not block, and
// of several calls for a port the first one's count for all.
func Open(port uint16, dir string, cfg session.Config, take func(Taken, session.Config)) (*Names, error) {
	here, err := own.use(Here(port), cfg, take)
	if err != nil {
		return nil, err
	}
	n := &Names{here: here}
	if dir != "" {
		n.there, n.Outside = own.use(Place{dir, here.at.Peer}, cfg, take)
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
	return x != nil && x.lack == nil
}

// use takes a name, unless the process has it, until release.
func (n *nameSet) use(at Place, cfg session.Config, take func(Taken, session.Config)) (*name, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	x := n.names[at]
	if x == nil {
		x = &name{at: at, namespace: shm.NetworkNamespace(), cfg: cfg, take: take}
		if x.takeLocked(); x.lack != nil {
			if !reason.Is(x.lack, session.ReasonResources) {
				return nil, x.lack
			}
			n.later(x)
		}
		n.names[at] = x
	} else {
		x.againLocked()
	}
	x.users++
	return x, nil
}

func (x *name) takeLocked() {
	x.tried = time.Now()
	x.listener, x.lack = shm.Listen(x.at.Peer.Port(), shm.Config{Dir: x.at.Dir}, func(ep session.Endpoint) {
		x.take(Taken{ep, shm.PeerUser(ep), x.at.Dir != ""}, x.cfg)
	})
}

// againLocked tries again, if it is time. A name that is not in the directory is one of the calling
// thread's network namespace: no thread of another one takes it.
func (x *name) againLocked() {
	if x.lack == nil || time.Since(x.tried) < againIn {
		return
	}
	if x.at.Dir != "" || shm.NetworkNamespace() == x.namespace {
		x.takeLocked()
	}
}

// later has a name tried again as long as it has users and is needed. Timers run on threads of the
// process's network namespace; in another one, it is tried again where its own threads use it.
func (n *nameSet) later(x *name) {
	time.AfterFunc(againIn, func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		if x.users == 0 {
			return
		}
		if x.againLocked(); x.lack != nil {
			n.later(x)
		}
	})
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
		l.Close() // the next one of the port meanwhile has another number
	}
}
