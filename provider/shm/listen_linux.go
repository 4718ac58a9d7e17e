package shm

import (
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

	mostClosing  = 16
	closeTimeout = time.Second
)

// Listener takes connections from processes of this host, under a name of its own. It is safe
// for concurrent use.
type Listener struct {
	cfg    Config
	number int // which of the port's names the process has
	unix   *net.UnixListener
	giveUp func() // called when nobody accepts any more; nil: the name ends with unix

	closed chan struct{}
	work   sync.WaitGroup // handshakes, and calls of take; none begins once done is set

	mu         sync.Mutex // guards what follows
	links      map[*link]struct{}
	handshakes map[*net.UnixConn]struct{} // for Close to hang up
	take       func(session.Endpoint)
	served     chan struct{} // closed when nobody accepts any more; nil: Serve was not called
	done       bool
}

// Listen lets processes of this host reach this process by a TCP port, under the first name of
// the port that is free. Until Serve is called, dialers wait. It fails with a
// *session.Unavailable. With cfg.Dir the name is one in that directory.
func Listen(port uint16, cfg Config) (*Listener, error) {
	l := &Listener{
		cfg:        cfg.withDefaults(),
		closed:     make(chan struct{}),
		links:      make(map[*link]struct{}),
		handshakes: make(map[*net.UnixConn]struct{}),
	}
	var err error
	if cfg.Dir == "" {
		l.unix, l.number, err = takeName(port)
	} else {
		l.unix, l.number, l.giveUp, err = takeFile(cfg.Dir, port)
	}
	if err != nil {
		return nil, unavailable(err)
	}
	return l, nil
}

// PeerUser is the user whose process is at the other end of one of this package's endpoints, by
// the kernel's credentials. It is never one that this process's user namespace does not map.
func PeerUser(ep session.Endpoint) uint32 { return ep.(*endpoint).link.peer.uid }

// Serve has take called for each connection, until Close, in the goroutine that has got it. It
// must not block: the dialing process's next connection waits for it. Serve may be called once.
func (l *Listener) Serve(take func(session.Endpoint)) {
	served := make(chan struct{})
	l.mu.Lock()
	done := l.done
	l.take, l.served = take, served
	l.mu.Unlock()
	if !done {
		l.serve()
	}
	close(served)
	l.work.Wait()
}

// Close gives up the name. Connections that were taken live on.
func (l *Listener) Close() error {
	l.mu.Lock()
	if l.done {
		l.mu.Unlock()
		return net.ErrClosed
	}
	l.done = true
	close(l.closed)
	links, handshakes, served := l.links, l.handshakes, l.served
	l.links, l.handshakes = nil, nil
	l.mu.Unlock()
	l.closeSocket(served)
	if l.giveUp != nil {
		l.giveUp()
	}
	for link := range links {
		link.closeUnused()
	}
	for c := range handshakes {
		hangUp(c)
	}
	l.work.Wait()
	return nil
}

// closeSocket closes the listening socket, in the background: that also closes what dialing
// processes have sent before they were accepted, which may take as long as they like. Each holds a
// thread meanwhile, so the Close of one more than mostClosing waits for its turn, for closeTimeout.
func (l *Listener) closeSocket(served <-chan struct{}) {
	l.unix.SetDeadline(longAgo)
	if served != nil {
		<-served // or the last to use the socket would close it
	}
	ended := func() { <-closing }
	select {
	case closing <- struct{}{}:
	case <-time.After(closeTimeout):
		ended = func() {}
	}
	go func() {
		l.unix.Close()
		ended()
	}()
}

// closing has a token for each listening socket that is being closed.
var closing = make(chan struct{}, mostClosing)

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
			go l.acceptLink(c, payer)
			continue
		}
		select {
		case refusing <- struct{}{}:
			go func() {
				l.refuse(c, payer)
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
// the listener is closed. acceptLink has to follow.
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

// refuse turns away a dialing process, with the reply that there is no room. If the listener
// is being closed it just hangs up: the dialer then looks for another.
func (l *Listener) refuse(c *net.UnixConn, theirs account) {
	defer theirs.closeLater(func() { c.Close() })
	l.mu.Lock()
	done := l.done
	if !done {
		l.handshakes[c] = struct{}{} // so that Close hangs up
		l.work.Add(1)
		defer l.work.Done()
	}
	l.mu.Unlock()
	if done {
		return
	}
	refuseLink(c, theirs)
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.handshakes, c)
}

// acceptLink makes the link. What it was charged with is given back when it ends.
func (l *Listener) acceptLink(c *net.UnixConn, payer account) {
	defer l.work.Done()
	link, err := acceptLink(c, l.cfg, l.accept)
	l.mu.Lock()
	delete(l.handshakes, c)
	done := l.done
	if err == nil && !done {
		l.links[link] = struct{}{}
	}
	l.mu.Unlock()
	if err != nil {
		l.linkClosed(nil, payer)
		return
	}
	link.whenClosed(func() { l.linkClosed(link, payer) })
	if done {
		link.closeUnused()
	}
}

func (l *Listener) linkClosed(k *link, payer account) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.links, k)
	payer.descriptors.Return(payer.user, linkDescriptors)
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
		delete(l.handshakes, k.control.UnixConn) // the handshake is over, though acceptLink may not have noticed
		l.work.Add(1)
	}
	take := l.take
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
		take(e)
	}
	l.work.Done()
	return codeOK
}
