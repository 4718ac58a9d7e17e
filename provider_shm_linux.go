package san

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/tcpid"
	"github.com/sanconn/san/provider/shm"
	"github.com/sanconn/san/session"
)

// shmProvider is the provider between processes of this host.
type shmProvider struct{}

func (shmProvider) name() string { return shm.Name }

const (
	// gapMost is how many names in a row may be free before the search for a process ends.
	// Each takes the first that is free, so there are gaps only where processes have ended.
	gapMost = 4

	// nobodyFor is how long a port of which nobody had a name is not asked for again: its
	// listener, most likely, does without this library.
	nobodyFor = time.Second
)

// move asks the processes that accept connections of the port, one after the other, until one
// has the other end of this one.
func (shmProvider) move(ctx context.Context, h newconn.Handle, s settings) error {
	tcp := h.TCP()
	if multipath, err := tcp.MultipathTCP(); multipath && err == nil {
		return &Unavailable{Reason: ReasonNotServed, Err: fmt.Errorf("shm: %w", tcpid.ErrMPTCP)}
	}
	ends, err := tcpid.EndsOf(tcp)
	if err != nil {
		return err
	}
	peer, err := tcpid.Peer(tcp)
	switch {
	case errors.Is(err, tcpid.ErrNotHere) && mayBeOutside(ends.Remote, s):
		return moveOutside(ctx, h, s, ends)
	case errors.Is(err, tcpid.ErrNotHere):
		return &Unavailable{Reason: ReasonNotServed, Err: fmt.Errorf("shm: %w", err)}
	case err != nil:
		return err
	case !peer.Accepted:
		return &Unavailable{Reason: ReasonNoListener, Err: errNotAccepted}
	}
	q := search{hello: hello{ends: ends, peerCookie: peer.Cookie}, at: namesHere(ends.Remote.Port()), user: peer.UID}
	if q.cookie, err = tcpid.Cookie(tcp); err != nil {
		return err
	}
	q.confirm = func(answer) error { return nil } // the kernel has told whose process it is
	return q.run(ctx, h, s)
}

// moveOutside looks for the process in the directory, and proves by the connection's stamp, both
// ways, that it has the other end.
func moveOutside(ctx context.Context, h newconn.Handle, s settings, ends tcpid.Ends) error {
	l := h.Life().(*life)
	return l.prove(h.TCP(), func(stamp tcpid.Stamp) error {
		return search{
			hello:   hello{ends: ends, stamped: true, challenge: stamp.Challenge()},
			at:      names{s.dir, ends.Remote},
			confirm: func(a answer) error { return l.confirm(stamp, a) },
		}.run(ctx, h, s)
	})
}

// mayBeOutside reports whether an address may be one of another network namespace of this host.
func mayBeOutside(remote netip.AddrPort, s settings) bool {
	return s.dir != "" && !remote.Addr().IsLoopback()
}

// names is where the processes that accept connections of a port have their names.
type names struct {
	dir  string         // "": in this network namespace
	peer netip.AddrPort // without the address in this network namespace, which all processes share
}

func namesHere(port uint16) names { return names{peer: netip.AddrPortFrom(netip.Addr{}, port)} }

// search looks for the process that has a connection's other end.
type search struct {
	hello
	at      names
	user    uint32             // whose process it has to be, in this network namespace
	confirm func(answer) error // returns why an answer is not that process's
}

func (q search) run(ctx context.Context, h newconn.Handle, s settings) error {
	var why error
	found, done := false, false
	ask := func(n int) (there bool) {
		var err error
		done, err = q.ask(ctx, h, s, n)
		unknown := errors.Is(err, errUnknown)
		there = unknown || !isReason(err, ReasonNoListener)
		found = found || there
		if done || there && !errors.Is(why, errUnknown) { // who has it not may accept it yet
			why = err
		}
		return there
	}
	last, known := shmPeers.last(q.at)
	if known {
		ask(last)
	}
	if !found && !done && shmPeers.nobody(q.to()) {
		return q.nobody()
	}
	for n, gap := 0, 0; !done && n < shm.Numbers && gap < gapMost; n++ {
		if gap++; known && n == last || ask(n) {
			gap = 0
		}
	}
	if !found && !done {
		shmPeers.noteNobody(q.at, q.to())
		return q.nobody()
	}
	return why
}

// to is what is remembered if no process is found: others of the port may serve another address.
func (q search) to() names { return names{q.at.dir, q.ends.Remote} }

func (q search) nobody() error {
	if q.at.dir != "" {
		return &Unavailable{Reason: ReasonNotServed,
			Err: fmt.Errorf("shm: %w, and no process in %s accepts for port %d", tcpid.ErrNotHere, q.at.dir, q.at.peer.Port())}
	}
	return &Unavailable{Reason: ReasonNoListener, Err: fmt.Errorf("shm: no process accepts for port %d", q.at.peer.Port())}
}

// linkTries is how often a process is asked whose link ends before it has taken the connection:
// by a link that was there, as of a process that has ended since, and by one that is made afresh.
const linkTries = 2

// ask offers the connection to one process. done: no other one is worth asking.
func (q search) ask(ctx context.Context, h newconn.Handle, s settings, number int) (done bool, err error) {
	for range linkTries {
		done, err = q.askOnce(ctx, h, s, number)
		if done || !errors.Is(err, shm.ErrLinkGone) || ctx.Err() != nil {
			break
		}
	}
	return done, err
}

func (q search) askOnce(ctx context.Context, h newconn.Handle, s settings, number int) (done bool, err error) {
	if h.Life().(*life).guesses.Load() >= mostGuesses {
		return true, errTooManyGuesses
	}
	ep, err := shm.Dial(ctx, q.at.peer.Port(), number, q.user, shm.Config{Dir: q.at.dir})
	if err != nil {
		return ctx.Err() != nil || errors.Is(err, shm.ErrDirectory), err
	}
	err = offer(ctx, ep, s.session, h, q.hello, q.confirm)
	switch {
	case err == nil, errors.Is(err, newconn.ErrNoAnswer):
		shmPeers.note(q.at, q.to(), number)
		return true, err
	case errors.Is(err, errUnknown), errors.Is(err, errOther), errors.Is(err, errImpostor), errors.Is(err, newconn.ErrNotTaken),
		isReason(err, ReasonNoListener), isReason(err, ReasonResources): // it has not taken it
		return false, err
	case errors.Is(err, unix.ECONNRESET), errors.Is(err, unix.EPIPE): // it has ended; if it had the other end, so does TCP
		return false, err
	case isReason(err, ReasonStays), isReason(err, ReasonRefused):
		shmPeers.note(q.at, q.to(), number)
	}
	return true, err
}

// dialed implements provider.
func (shmProvider) dialed(tcp *net.TCPConn, began time.Time, l *life, s settings) {
	if mayBeOutside(tcp.RemoteAddr().(*net.TCPAddr).AddrPort(), s) {
		l.dialerStamps(tcp, began)
	}
}

// stamps reports whether there is a directory, where connections are told by their stamps.
func (shmProvider) stamps(s settings) bool { return s.dir != "" }

// shmPeers remembers which process had the last connection. It is a hint: what it says of a
// port may be of another address, or of a process that has ended.
var shmPeers peerHints

// mostHints bounds what is remembered; then all is forgotten. A process seldom has so many
// destinations on its host.
const mostHints = 4096

type peerHints struct {
	mu     sync.Mutex // guards what follows
	number map[names]int
	free   map[names]time.Time // when nobody was found for it
}

func (p *peerHints) last(at names) (number int, known bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	number, known = p.number[at]
	return number, known
}

func (p *peerHints) note(at, to names, number int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.number) >= mostHints || p.number == nil {
		p.number = make(map[names]int)
	}
	p.number[at] = number
	delete(p.free, to)
}

func (p *peerHints) nobody(at names) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	when, noted := p.free[at]
	return noted && time.Since(when) < nobodyFor
}

func (p *peerHints) noteNobody(at, to names) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.free) >= mostHints || p.free == nil {
		p.free = make(map[names]time.Time)
	}
	p.free[to] = time.Now()
	delete(p.number, at)
}

// listen implements provider.
func (shmProvider) listen(tcp *net.TCPListener, s settings) (acceptor, error) {
	at := tcp.Addr().(*net.TCPAddr).AddrPort()
	release, outside, err := shmNames.open(at, s)
	if err != nil {
		return nil, err
	}
	if outside == nil && mayBeOutside(at, s) {
		if err := tcpid.SaveSYN(tcp); err != nil {
			outside = &Unavailable{Reason: ReasonNotServed, Err: err}
		}
	}
	return shmAcceptor(release), outside
}

// hold implements provider.
func (shmProvider) hold(tcp *net.TCPConn, s settings) (release func(), err error) {
	release, _, err = shmNames.open(tcp.LocalAddr().(*net.TCPAddr).AddrPort(), s)
	return release, err
}

// shmAcceptor gives up a listener's use of its names.
type shmAcceptor func()

// Waiting implements acceptor.
func (shmAcceptor) Waiting() error { return nil }

// Close implements acceptor.
func (release shmAcceptor) Close() error {
	release()
	return nil
}

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
		name = &processName{Listener: l}
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
	return func() { n.release(at, name) }, nil
}

// release gives a name up with its last use.
func (n *nameSet) release(at names, name *processName) {
	n.mu.Lock()
	name.users--
	last := name.users == 0
	if last {
		delete(n.names, at)
	}
	n.mu.Unlock()
	if last {
		name.Close() // the next one of the port meanwhile has another number
	}
}
