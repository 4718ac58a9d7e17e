package shm

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

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

	// closeTimeout bounds how long Close waits for the rendezvous to be closed.
	closeTimeout = time.Second
)

// Listener accepts connections from processes of this host, for a TCP listener
// of this process. It is safe for concurrent use.
type Listener struct {
	cfg  Config
	addr netip.AddrPort

	netns uint64           // of the TCP listener
	inode uint32           // likewise
	diag  *diagSocket      // in its network namespace
	tcp   *net.TCPListener // kept from the garbage collector, which would close it

	open     openEnds
	accepted chan accepted
	closing  atomic.Bool
	closed   chan struct{}
	work     sync.WaitGroup // handshakes

	line   line                  // of begin, standInLine and leave, in turn
	behind atomic.Pointer[error] // why it is not first in line; nil: it is

	mu         sync.Mutex // guards what follows
	links      map[*link]struct{}
	handshakes map[*net.UnixConn]struct{} // for Close to hang up
	take       TakeFunc                   // nil: connections wait for Accept
	done       bool

	taking sync.WaitGroup // calls of take; none begins once done is set
	taken  chan struct{}  // closed when the last one has returned
}

// TakeFunc takes a connection that was accepted. It must not block: the dialing process's next
// connection waits for it.
type TakeFunc func(ep session.Endpoint, local, remote *net.TCPAddr)

type accepted struct {
	ep            *endpoint
	local, remote netip.AddrPort
}

// Listen accepts connections for a TCP listener, which stays the caller's and has to
// stay open until Close. It fails with a *session.Unavailable: with ReasonNotServed if
// the listener's address is not served or TCP connects of this host would not reach it,
// with ReasonOwner if its socket belongs to another user, or another process serves it
// and cfg.TakeOver is not set.
func Listen(tcp *net.TCPListener, cfg Config) (*Listener, error) {
	cfg = cfg.withDefaults()
	addr := unmap(tcp.Addr().(*net.TCPAddr).AddrPort())
	if !addr.Addr().IsUnspecified() {
		if err := ServedBy(addr.Addr(), cfg); err != nil {
			return nil, &session.Unavailable{Reason: session.ReasonNotServed, Err: err}
		}
	}
	rc, err := tcp.SyscallConn()
	if err != nil {
		return nil, unavailable(err)
	}
	l := &Listener{
		cfg:        cfg,
		addr:       addr,
		tcp:        tcp,
		accepted:   make(chan accepted, cfg.Backlog),
		closed:     make(chan struct{}),
		taken:      make(chan struct{}),
		links:      make(map[*link]struct{}),
		handshakes: make(map[*net.UnixConn]struct{}),
	}
	if e := rc.Control(func(fd uintptr) {
		l.netns = netns(int(fd))
		err = l.identify(int(fd))
	}); e != nil || err != nil {
		return nil, unavailable(errors.Join(e, err))
	}
	if l.diag, err = listenerDiag(addr); err != nil {
		return nil, err
	}
	if err = l.begin(); err != nil {
		l.Close() // one of its entrances may have been open for a moment
		return nil, err
	}
	return l, nil
}

// identify finds the TCP socket's inode. A socket that another user has made, and passed on,
// does not do: dialers believe nobody but its owner.
func (l *Listener) identify(fd int) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	l.inode = uint32(st.Ino)
	if us := os.Geteuid(); int(st.Uid) != us {
		return &session.Unavailable{Reason: session.ReasonOwner,
			Err: fmt.Errorf("shm: the TCP socket belongs to user %d, and this process to user %d: dialers would not believe it", st.Uid, us)}
	}
	return nil
}

// listenerDiag returns what a listener asks by which socket TCP would reach, once it has
// found out that connects from this host reach one at all.
func listenerDiag(addr netip.AddrPort) (*diagSocket, error) {
	if err := diagWorks(); err != nil {
		return nil, unavailable(err)
	}
	d, err := newDiagSocket()
	if err != nil {
		return nil, unavailable(err)
	}
	at := addr.Addr()
	switch {
	case at == netip.IPv4Unspecified():
		at = netip.AddrFrom4([4]byte{127, 0, 0, 1})
	case at.IsUnspecified():
		at = netip.IPv6Loopback()
	}
	const anyPort = 1
	o, err := d.find(netip.AddrPortFrom(at, anyPort), netip.AddrPortFrom(at, addr.Port()))
	switch {
	case err == nil && o.signed:
		err = &session.Unavailable{Reason: session.ReasonNotServed, Err: errSigned}
	case errors.Is(err, errNotFound):
		err = &session.Unavailable{Reason: session.ReasonNotServed,
			Err: fmt.Errorf("shm: connects of this host do not reach %v: it may be bound to a device, or be of another network namespace", addr)}
	case err != nil:
		err = unavailable(err)
	}
	if err != nil {
		d.close()
		return nil, err
	}
	return d, nil
}

// Accept waits for the next connection and returns its endpoint, and its addresses as
// they would be over TCP. After Close it returns net.ErrClosed.
func (l *Listener) Accept() (ep session.Endpoint, local, remote *net.TCPAddr, err error) {
	select {
	case <-l.closed:
		return nil, nil, nil, net.ErrClosed
	default:
	}
	select {
	case a := <-l.accepted:
		return a.ep, net.TCPAddrFromAddrPort(a.local), net.TCPAddrFromAddrPort(a.remote), nil
	case <-l.closed:
		return nil, nil, nil, net.ErrClosed
	}
}

// Serve has take called for each connection, instead of Accept, until Close, in the goroutine
// that has got it. A connection so reaches its program with one goroutine less to wake.
func (l *Listener) Serve(take TakeFunc) {
	l.mu.Lock()
	l.take = take
	l.mu.Unlock()
	for {
		ep, local, remote, err := l.Accept() // those that came before
		if err != nil {
			break
		}
		take(ep, local, remote)
	}
	<-l.taken
}

// PeerUser is the user whose process is at the other end of one of this package's endpoints.
func PeerUser(ep session.Endpoint) uint32 { return ep.(*endpoint).link.peer.uid }

// Close stops accepting. Connections that Accept returned live on; those that
// nobody accepted are closed.
func (l *Listener) Close() error {
	if l.closing.Swap(true) {
		return net.ErrClosed
	}
	close(l.closed)
	err := l.leave() // first: a dialer that is told of the end looks for the next listener
	l.mu.Lock()
	l.done = true
	links, handshakes := l.links, l.handshakes
	l.links, l.handshakes = nil, nil
	l.mu.Unlock()
	for {
		select {
		case a := <-l.accepted:
			a.ep.Close() // not Abort: its dialer has a connection
			a.ep.Retire()
			continue
		default:
		}
		break
	}
	l.taking.Wait()
	close(l.taken)
	for link := range links {
		link.closeUnused()
	}
	for c := range handshakes {
		hangUp(c)
	}
	l.work.Wait()
	l.diag.close()
	return err
}

// serve accepts the sockets of dialing processes and makes a link with each in a goroutine, so that
// a slow one holds up nobody.
func (l *Listener) serve(at *entrance) {
	defer close(at.served)
	refusing := make(chan struct{}, maxRefusing)
	for {
		c, err := at.unix.AcceptUnix()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			select {
			case <-time.After(acceptPause):
			case <-at.shut:
				return
			}
			continue
		}
		payer, ok := l.admit(c)
		if !ok {
			select {
			case refusing <- struct{}{}:
				l.work.Go(func() {
					l.refuse(c, payer)
					<-refusing
				})
			default:
				payer.closeLater(func() { c.Close() })
			}
			if payer.descriptors.Used() >= payer.descriptors.Limit() {
				payer.awaitClosing(at.shut) // meanwhile dialers find the queue full
			}
			continue
		}
		l.work.Add(1)
		go func() {
			defer l.work.Done()
			l.acceptLink(c, payer)
		}()
	}
}

// admit charges a new link to the user of the dialing process, unless that holds too much.
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
	if l.done || !payer.take(payer.descriptors, linkDescriptors) {
		return payer, false
	}
	l.handshakes[c] = struct{}{}
	return payer, true
}

// refuse turns away a dialing process, with the reply that there is no room. If the listener
// is being closed it just hangs up: the dialer then looks for the port's next listener.
func (l *Listener) refuse(c *net.UnixConn, theirs account) {
	defer theirs.closeLater(func() { c.Close() })
	l.mu.Lock()
	done := l.done
	if !done {
		l.handshakes[c] = struct{}{} // so that Close hangs up
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
	payer.giveBack(payer.descriptors, linkDescriptors)
}
