package san

import (
	"net/netip"
	"sync"

	"github.com/sanconn/san/provider/shm"
	"github.com/sanconn/san/session"
)

// shmNames are the names of this process: for each port one, however many listeners and
// connections use it, and one more in the directory.
var shmNames = nameSet{names: make(map[names]*processName)}

type nameSet struct {
	mu    sync.Mutex // guards what follows, and the making of names
	names map[names]*processName
}

// processName is a name of this process.
type processName struct {
	*shm.Listener
	at    names
	users int // guarded by the set's mu
}

// open has other processes find this one for connections to an address, until release. outside
// is why those of other network namespaces do not, where there is a directory for them.
func (n *nameSet) open(at netip.AddrPort, s settings) (release func(), outside, err error) {
	here, err := n.use(namesHere(at.Port()), s.session)
	if err != nil || !mayBeOutside(at, s) {
		return here, nil, err
	}
	there, err := n.use(names{s.dir, namesHere(at.Port()).peer}, s.session)
	if err != nil {
		return here, err, nil
	}
	return func() { here(); there() }, nil, nil
}

// use takes a name, unless the process has it, until release.
func (n *nameSet) use(at names, cfg session.Config) (release func(), err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	name := n.names[at]
	if name == nil {
		l, err := shm.Listen(at.peer.Port(), shm.Config{Dir: at.dir})
		if err != nil {
			return nil, err
		}
		name = &processName{Listener: l, at: at}
		n.names[at] = name
		go l.Serve(func(ep session.Endpoint) { // until the last user has released it
			c := came{Endpoint: ep, provider: shm.Name, outside: at.dir != ""}
			if user := shm.PeerUser(ep); !c.outside {
				c.user = &user
			}
			receive(c, cfg)
		})
	}
	name.users++
	return func() { n.release(name) }, nil // of each accepted connection, so it holds little
}

// release gives a name up with its last use.
func (n *nameSet) release(name *processName) {
	n.mu.Lock()
	name.users--
	last := name.users == 0
	if last {
		delete(n.names, name.at)
	}
	n.mu.Unlock()
	if last {
		name.Close() // the next one of the port meanwhile has another number
	}
}
