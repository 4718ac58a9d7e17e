package san

import (
	"context"
	"errors"
	"fmt"
	"io"
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
			at:      namesIn(s.dir, ends.Remote),
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

func namesIn(dir string, peer netip.AddrPort) names { return names{dir, peer} }

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

// ask offers the connection to one process. done: no other one is worth asking.
func (q search) ask(ctx context.Context, h newconn.Handle, s settings, number int) (done bool, err error) {
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
	case errors.Is(err, errUnknown), errors.Is(err, errOther), errors.Is(err, errImpostor):
		return false, err
	case errors.Is(err, unix.ECONNRESET), errors.Is(err, unix.EPIPE): // it has ended; if it had the other end, so does TCP
		return false, err
	case isReason(err, ReasonStays):
		shmPeers.note(q.at, q.to(), number)
	}
	return true, err
}

func isReason(err error, r Reason) bool {
	var why *Unavailable
	return errors.As(err, &why) && why.Reason == r
}

// dialed implements provider.
func (shmProvider) dialed(tcp *net.TCPConn, began time.Time, l *life, s settings) (near bool) {
	ends, err := tcpid.EndsOf(tcp)
	if err != nil {
		return false
	}
	if mayBeOutside(ends.Remote, s) {
		l.dialerStamps(tcp, began)
		if _, near = shmPeers.last(namesIn(s.dir, ends.Remote)); near {
			return true
		}
	}
	_, near = shmPeers.last(namesHere(ends.Remote.Port()))
	return near
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

// listen implements provider. A process has one name for a port, however many listeners, and
// one more in the directory.
func (shmProvider) listen(tcp *net.TCPListener, s settings) (acceptor, error) {
	at := tcp.Addr().(*net.TCPAddr)
	a, err := shmNames.open(at, s)
	if err == nil && len(a.uses) > 1 {
		if err := tcpid.SaveSYN(tcp); err != nil {
			a.lack = &Unavailable{Reason: ReasonNotServed, Err: err}
		}
	}
	return a, err
}

// nameFor has other processes find this one for a connection that it has not accepted itself.
func nameFor(tcp *net.TCPConn, s settings) (io.Closer, error) {
	return shmNames.open(tcp.LocalAddr().(*net.TCPAddr), s)
}

// shmAcceptor is the use of a name in this network namespace, and of one in the directory.
type shmAcceptor struct {
	uses []*nameUse
	lack error // why there is none in the directory
}

// Waiting implements acceptor.
func (*shmAcceptor) Waiting() error { return nil }

// lacks returns why connections from other network namespaces stay on TCP, where there is a
// directory for them.
func (a *shmAcceptor) lacks() error { return a.lack }

// Close implements acceptor.
func (a *shmAcceptor) Close() (err error) {
	for _, u := range a.uses {
		err = errors.Join(err, u.Close())
	}
	return err
}

// hold is another use of the names, by a connection: see Listener.hold.
func (a *shmAcceptor) hold() (release func()) {
	shmNames.mu.Lock()
	defer shmNames.mu.Unlock()
	var held shmAcceptor
	for _, u := range a.uses {
		if u.name.users > 0 { // or the listener has been closed meanwhile
			u.name.users++
			held.uses = append(held.uses, &nameUse{name: u.name})
		}
	}
	return func() { held.Close() }
}

var shmNames = nameSet{names: make(map[nameKey]*processName)}

// nameSet has the names of this process.
type nameSet struct {
	mu    sync.Mutex // guards what follows, and the making of names
	names map[nameKey]*processName
}

type nameKey struct {
	port uint16
	dir  string // "": in the network namespace
}

// processName is the name of this process for a port.
type processName struct {
	key      nameKey
	listener *shm.Listener
	users    int // guarded by the set's mu
}

// open has other processes find this one for connections to an address.
func (n *nameSet) open(at *net.TCPAddr, s settings) (*shmAcceptor, error) {
	here, err := n.get(nameKey{uint16(at.Port), ""}, s.session)
	if err != nil {
		return nil, err
	}
	a := &shmAcceptor{uses: []*nameUse{here}}
	if mayBeOutside(at.AddrPort(), s) {
		if u, err := n.get(nameKey{uint16(at.Port), s.dir}, s.session); err == nil {
			a.uses = append(a.uses, u)
		} else {
			a.lack = err
		}
	}
	return a, nil
}

func (n *nameSet) get(key nameKey, cfg session.Config) (*nameUse, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	name := n.names[key]
	if name == nil {
		l, err := shm.Listen(key.port, shm.Config{Dir: key.dir})
		if err != nil {
			return nil, err
		}
		name = &processName{key: key, listener: l}
		n.names[key] = name
		go l.Serve(func(ep session.Endpoint) { // until the last user has closed it
			c := came{Endpoint: ep, provider: shm.Name, outside: key.dir != ""}
			if user := shm.PeerUser(ep); !c.outside {
				c.user = &user
			}
			receive(c, cfg)
		})
	}
	name.users++
	return &nameUse{name: name}, nil
}

// nameUse is a listener's use of a name.
type nameUse struct {
	name *processName
	once sync.Once
}

// Close gives the name up with its last use.
func (u *nameUse) Close() (err error) {
	u.once.Do(func() {
		shmNames.mu.Lock()
		defer shmNames.mu.Unlock()
		if u.name.users--; u.name.users == 0 {
			delete(shmNames.names, u.name.key)
			err = u.name.listener.Close()
		}
	})
	return err
}
