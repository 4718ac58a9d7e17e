package shm

import (
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"time"

	"github.com/sanconn/san/session"
)

const (
	// acceptPause is the wait after accept failed, most likely for lack of
	// descriptors.
	acceptPause = 10 * time.Millisecond

	// refuseTimeout bounds the reply to a dialer that there is no room. maxRefusing
	// dialers at a time get that reply; others only see the socket close.
	refuseTimeout = 100 * time.Millisecond
	maxRefusing   = 16
)

// Listener takes connections from processes of this host, under a name of its own. It is safe
// for concurrent use.
type Listener struct {
	cfg      Config
	name     string
	unix     *net.UnixListener
	giveUp   func() // of a name in a directory; nil: the name ends with unix
	accepted func(session.Endpoint)

	closed chan struct{}
	work   sync.WaitGroup // serve, handshakes, and calls of accepted; none begins once done is set

	mu         sync.Mutex // guards what follows
	links      map[*link]struct{}
	handshakes map[*net.UnixConn]struct{} // for Close to hang up
	done       bool
}

// Listen lets processes of this host reach this process by a TCP port, under a name of the port.
// With cfg.Dir the name is one in that directory. It fails with a *session.Unavailable.
//
// accepted is called for each connection, until Close, in the goroutine that has got it. It must not
// block: the dialing process's next connection waits for it.
func Listen(port uint16, cfg Config, accepted func(session.Endpoint)) (*Listener, error) {
	l := &Listener{
		cfg:        cfg.withDefaults(),
		accepted:   accepted,
		closed:     make(chan struct{}),
		links:      make(map[*link]struct{}),
		handshakes: make(map[*net.UnixConn]struct{}),
	}
	prefix := prefixOf(cfg.Dir, port)
	l.name = fmt.Sprintf("%s%016x", prefix, rand.Uint64())
	var err error
	if cfg.Dir == "" {
		l.unix, err = listenUnix(l.name)
	} else {
		l.unix, l.giveUp, err = listenIn(cfg.Dir, prefix, l.name)
	}
	if err != nil {
		return nil, unavailable(err)
	}
	l.work.Go(l.serve)
	return l, nil
}

// PeerUser is the user whose process is at the other end of one of this package's endpoints, by
// the kernel's credentials. It is never one that this process's user namespace does not map.
func PeerUser(ep session.Endpoint) uint32 { return ep.(*endpoint).link.peer.uid }

// Close gives up the name. Connections that were taken live on.
func (l *Listener) Close() error {
	l.mu.Lock()
	if l.done {
		l.mu.Unlock()
		return net.ErrClosed
	}
	l.done = true
	hangUp(l.unix)
	l.unix.SetDeadline(longAgo)
	close(l.closed) // serve, which waits for no closers from then on, accepts no more
	links, handshakes := l.links, l.handshakes
	l.links, l.handshakes = nil, nil
	l.mu.Unlock()
	for link := range links {
		link.closeUnused()
	}
	for c := range handshakes {
		hangUp(c)
	}
	l.work.Wait()
	if l.giveUp != nil {
		l.giveUp()
	}
	// This has the sockets closed that nobody has accepted, too: they end at once, but what came with
	// them may take as long to close as those who have sent it like. One such listener must not keep
	// another from that, and the program bounds how many it closes: so each has a goroutine.
	go l.unix.Close()
	return nil
}

// serve accepts the sockets of dialing processes and makes a link with each in a goroutine, so that
// a slow one holds up nobody.
func (l *Listener) serve() {
	refusing := make(chan struct{}, maxRefusing)
	for {
		c, err := l.unix.AcceptUnix()
		if err != nil {
			select {
			case <-time.After(acceptPause):
			case <-l.closed:
				return
			}
			continue
		}
		payer, ok := l.admit(c)
		if ok {
			go l.handshake(c, payer)
			continue
		}
		select {
		case refusing <- struct{}{}:
			go func() {
				l.turnAway(c, payer)
				<-refusing
			}()
		default:
			payer.closeLater(func() { c.Close() })
		}
		if payer.descriptors.Used() >= payer.descriptors.Limit() {
			payer.awaitClosing(l.closed) // meanwhile dialers find the queue full
		}
	}
}

// admit charges a new link to the user of the dialing process, unless that holds too much or
// the listener is closed. handshake has to follow.
func (l *Listener) admit(c *net.UnixConn) (payer account, ok bool) {
	payer = accountOf(overflowUID)
	rc, err := c.SyscallConn()
	if err != nil {
		return payer, false
	}
	cred, err := peerCred(rc)
	if err != nil {
		return payer, false
	}
	payer = accountOf(cred.Uid)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.done || !payer.descriptors.Take(payer.user, linkDescriptors) {
		return payer, false
	}
	l.handshakes[c] = struct{}{}
	l.work.Add(1)
	return payer, true
}

// turnAway refuses a dialing process, with the reply that there is no room. If the listener
// is being closed it just hangs up: the dialer then looks for another.
func (l *Listener) turnAway(c *net.UnixConn, peerUser account) {
	select {
	case <-l.closed:
	default:
		refuseLink(c, peerUser)
	}
	peerUser.closeLater(func() { c.Close() })
}

// handshake makes the link. What it was charged with is given back when it ends.
func (l *Listener) handshake(c *net.UnixConn, payer account) {
	defer l.work.Done()
	k, err := acceptLink(c, l.cfg, l.accept)
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.handshakes, c)
	if err != nil {
		payer.descriptors.Return(payer.user, linkDescriptors)
		return
	}
	k.start(func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.links, k)
		payer.descriptors.Return(payer.user, linkDescriptors)
	})
	if l.done {
		k.closeUnused()
	} else {
		l.links[k] = struct{}{}
	}
}

// accept takes a connection on a link, or returns the code that refuses it.
func (l *Listener) accept(k *link, s *slot) (code uint8) {
	e := newEndpoint(k, s, s.peers.control.state.turn())
	l.mu.Lock()
	code = codeClosed
	if !l.done {
		code = k.attach(e)
	}
	if code == codeOK {
		l.work.Add(1)
	}
	l.mu.Unlock()
	if code != codeOK {
		e.discard()
		return code
	}
	e.begin()
	if e.remote.gaveUp(e.turn) { // before it could be taken
		e.Close() // in order: nothing is lost by it
		e.Retire()
	} else {
		l.accepted(e)
	}
	l.work.Done()
	return codeOK
}
