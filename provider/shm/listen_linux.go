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
	// acceptPause is the pause after a failed accept, most likely for lack of descriptors.
	acceptPause = 10 * time.Millisecond

	// refuseTimeout bounds the reply to a dialer that there is no room. At most maxRefusing dialers at
	// a time get this reply; for others the socket is closed.
	refuseTimeout = 100 * time.Millisecond
	maxRefusing   = 16
)

// Listener takes connections from processes of this host, under a name of its own. It is safe for
// concurrent use.
type Listener struct {
	cfg      Config
	name     string
	unix     *net.UnixListener
	giveUp   func() // removes a name in a directory; nil: the name ends with unix
	accepted func(session.Endpoint)

	closed chan struct{}
	work   sync.WaitGroup // serve, handshakes, and calls of accepted; none begins once done is set

	mu         sync.Mutex // guards the fields below
	links      map[*link]struct{}
	handshakes map[*net.UnixConn]struct{} // shut down by Close
	done       bool
}

// Listen lets processes of this host reach this process for connections on a TCP port, under a new name
// for that port, in the network namespace of the calling thread or in cfg.Dir. The error is a
// *session.Unavailable.
//
// accepted is called for each connection until Close, in the goroutine that has received it. It must
// not block: the dialing process's next connection waits for it.
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

// PeerUser returns the user whose process is at the other end of one of this package's endpoints, by
// the kernel's credentials. Except for a name in a directory, it is never a user that this user
// namespace does not map.
func PeerUser(ep session.Endpoint) uint32 { return ep.(*endpoint).link.peer.uid }

// Close gives the name up. Connections that were accepted live on. A second Close returns
// net.ErrClosed.
func (l *Listener) Close() error {
	l.mu.Lock()
	if l.done {
		l.mu.Unlock()
		return net.ErrClosed
	}
	l.done = true
	hangUp(l.unix)
	l.unix.SetDeadline(longAgo)
	close(l.closed) // from now on serve neither waits for closers nor accepts
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
	// Close of the socket also closes sockets that were not accepted. Those end at once, but
	// descriptors in their queues may take as long to close as their senders like. Each listener has a
	// goroutine for it, so that one does not delay another; their number is bounded by how many
	// listeners the program closes.
	go l.unix.Close()
	return nil
}

// serve accepts the sockets of dialing processes, and makes a link with each in its own goroutine, so
// that a slow process delays no other.
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
			payer.awaitClosing(l.closed) // meanwhile dialers find the listener's queue full
		}
	}
}

// admit charges a new link to the dialing process's user, unless that user holds too much or the
// listener is closed. If it returns true, handshake must follow.
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

// turnAway refuses a dialing process, with the reply that there is no room. If the listener is being
// closed it only closes the socket; the dialer then looks for another name.
func (l *Listener) turnAway(c *net.UnixConn, peerUser account) {
	select {
	case <-l.closed:
	default:
		refuseLink(c, peerUser)
	}
	peerUser.closeLater(func() { c.Close() })
}

// handshake makes the link. The charge is given back when the link ends.
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
	if e.remote.gaveUp(e.turn) { // before this process took it
		e.Close() // in order, as nothing is lost
		e.Retire()
	} else {
		l.accepted(e)
	}
	l.work.Done()
	return codeOK
}
