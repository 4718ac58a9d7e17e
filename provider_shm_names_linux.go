package san

import (
	"net/netip"
	"sync"
	"time"

	"github.com/sanconn/san/internal/reason"
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

// processName is a name that this process has, or will have: while descriptors or the port's numbers
// are used up, it tries again once in a while.
type processName struct {
	at  names
	cfg session.Config

	// The set's mu guards what follows.
	users    int
	listener *shm.Listener
	lack     error // why it does not have it yet; nil: it has
}

// againIn is when a name is tried again.
const againIn = time.Second

// open has other processes find this one for connections to an address, until Close.
func (n *nameSet) open(at netip.AddrPort, s settings) (*shmAcceptor, error) {
	here, err := n.use(namesHere(at.Port()), s.session)
	if err != nil {
		return nil, err
	}
	a := &shmAcceptor{here: here}
	if mayBeOutside(at, s) {
		a.there, a.outside = n.use(names{s.dir, here.at.peer}, s.session)
	}
	return a, nil
}

// shmAcceptor is the use of the names for an address.
type shmAcceptor struct { // of each accepted connection, so it holds little
	here, there *processName // there: in the directory, or nil
	outside     error        // why those of other network namespaces do not find this process
}

// Lacks implements acceptor.
func (a *shmAcceptor) Lacks() (why error, all bool) {
	shmNames.mu.Lock()
	defer shmNames.mu.Unlock()
	switch {
	case a.here.lack != nil:
		return a.here.lack, true
	case a.there != nil && a.there.lack != nil:
		return a.there.lack, false
	}
	return a.outside, false
}

// Close gives the names up.
func (a *shmAcceptor) Close() error {
	for _, name := range []*processName{a.here, a.there} {
		if name != nil {
			shmNames.release(name)
		}
	}
	return nil
}

// use takes a name, unless the process has it, until release.
func (n *nameSet) use(at names, cfg session.Config) (*processName, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	name := n.names[at]
	if name == nil {
		name = &processName{at: at, cfg: cfg}
		if n.takeLocked(name); name.lack != nil && !reason.Is(name.lack, ReasonResources) {
			return nil, name.lack
		}
		n.names[at] = name
	}
	name.users++
	return name, nil
}

func (n *nameSet) takeLocked(name *processName) {
	outside := name.at.dir != ""
	l, err := shm.Listen(name.at.peer.Port(), shm.Config{Dir: name.at.dir}, func(ep session.Endpoint) {
		c := came{Endpoint: ep, provider: shm.Name, outside: outside}
		if user := shm.PeerUser(ep); !outside {
			c.user = &user
		}
		receive(c, name.cfg)
	})
	if name.lack = err; err != nil {
		time.AfterFunc(againIn, func() {
			n.mu.Lock()
			defer n.mu.Unlock()
			if name.users > 0 {
				n.takeLocked(name)
			}
		})
		return
	}
	name.listener = l
}

// release gives a name up with its last use.
func (n *nameSet) release(name *processName) {
	n.mu.Lock()
	name.users--
	last, l := name.users == 0, name.listener
	if last {
		delete(n.names, name.at)
	}
	n.mu.Unlock()
	if last && l != nil {
		l.Close() // the next one of the port meanwhile has another number
	}
}
