package san

import (
	"cmp"
	"context"
	"errors"
	"io"
	"maps"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/sanconn/san/internal/moving"
	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/reason"
	"github.com/sanconn/san/internal/tcpid"
	"github.com/sanconn/san/internal/undernet"
	"github.com/sanconn/san/sanconn"
)

// Listen listens on the address as net.Listen does, for connections that begin on TCP and may
// move to the SANs of this host. It is the same as Listen of a zero ListenConfig.
func Listen(network, address string) (net.Listener, error) {
	return new(ListenConfig).Listen(context.Background(), network, address)
}

// ListenConfig has the settings of a listener. The zero value is ready for
// use. Its methods may be called concurrently; its fields must not be changed
// meanwhile.
type ListenConfig struct {
	// NetListenConfig opens the TCP listener. Where this host has an RDMA device that may be
	// used, or there is a ShmDir, Multipath TCP is switched off: see docs/SECURITY.md.
	NetListenConfig net.ListenConfig

	// Policy: with Prefer, the default, all connections are accepted, and move if they can.
	// With Require, Accept returns those alone that have moved before a byte was read or
	// written; others are reset, after 10 s at the latest, and Listen fails if there is no SAN.
	// With Never there is TCP alone.
	Policy Policy

	// Providers are the providers that connections may move to: "shm", "verbs". Nil means all
	// that this build and this host have; empty means none. SAN_PROVIDERS restricts them
	// in any case. With an unknown name Listen on a TCP network fails.
	Providers []string

	// Backlog is how many connections may move or wait for Accept, with the policy Require:
	// one that does not move counts until it is reset. A further one waits, and then the oldest
	// is reset that nobody has proposed to move for 5 s. Default 1024, at most 65536. It is
	// not TCP's, where those behind the one that waits are.
	Backlog int

	// Condition, if not nil, decides for each connection whether it may move to a SAN, when its
	// dialer proposes that: with an error it may not, nor if Condition ends its goroutine
	// (runtime.Goexit) instead of returning. The connection is the program's already, on
	// TCP, and stays there, with ReasonRefused at both ends; the dialer does not propose it again.
	// Where the dialer's policy is Require, its Dial fails with an error that matches
	// syscall.ECONNREFUSED. Where this one's is, Accept does not return the connection, which is
	// reset after 10 s.
	//
	// It is called for each provider that is tried, by several goroutines at a time, without a
	// lock. While it blocks, that connection does not move, and is used by TCP. Only the ends of
	// its streams (the dialer's CloseWrite, and what its Read finds at the end) and the dialer's
	// use of the descriptor wait for it, for half a second at most. A dialer waits for 2 s, or for
	// up to 10 s with Require; what is decided later counts when it next tries to move the
	// connection. It outlives the listener.
	Condition func(MoveProposal) error

	// Options tune connections over a SAN. Of a process's listeners on one port, over shm the
	// first one's count for all.
	Options sanconn.Options

	// RDMA is how connections over RDMA are made.
	RDMA RDMA

	// ShmDir is the same as Dialer.ShmDir, for connections from other network namespaces.
	ShmDir string
}

// MoveProposal is what ListenConfig.Condition decides about: that a connection, which TCP has
// accepted, moves to a SAN.
type MoveProposal struct {
	LocalAddr, RemoteAddr *net.TCPAddr // the connection's, as at this end, without zones
	Provider              string       // "shm", "verbs"

	// UID is the user of the process at the other end, by the kernel's credentials, where that
	// is a process of this network namespace (by shm). Otherwise it is -1.
	UID int64
}

const (
	defaultBacklog = 1024
	maxBacklog     = 1 << 16
)

// stamps reports whether connections may be told by their stamps.
func (o opening) stamps() bool {
	return slices.ContainsFunc(o.choice.Providers, func(p moving.Provider) bool { return p.Stamps(o.choice.Settings) })
}

// Listen opens a TCP listener, by NetListenConfig, and makes it known to each provider that
// serves its address. For tcp, tcp4 and tcp6 the result is a *Listener; other networks are left
// to net, or fail if the policy is Require.
//
// That a provider cannot serve it is no error; Stats counts it, if there is such a SAN, and
// Listener.Unavailable has the reason. Only if the policy is Require and no provider can,
// Listen fails: errors.As finds an *Unavailable. ctx is for looking up the address;
// when it ends, the listener lives on.
func (lc *ListenConfig) Listen(ctx context.Context, network, address string) (net.Listener, error) {
	if !isTCP(network) {
		if lc.Policy == Require {
			return nil, serverError("listen", network, nil, requireError{notTCP(network)})
		}
		moving.Count(func(n *moving.Counters) { n.Listeners[ReasonNetwork]++ })
		return lc.NetListenConfig.Listen(ctx, network, address)
	}
	o, err := lc.opening()
	if err != nil {
		return nil, serverError("listen", network, nil, err)
	}
	o.choice.Settings.V6Only = network == "tcp6"
	o.choice.Settings.Zone = zoneOf(address)
	plain := lc.NetListenConfig
	if o.stamps() {
		plain.SetMultipathTCP(false)
	}
	inner, err := plain.Listen(undernet.Plain(ctx), network, address)
	if err != nil {
		return nil, err
	}
	l, err := o.around(inner.(*net.TCPListener))
	if err != nil {
		inner.Close()
		return nil, serverError("listen", network, inner.Addr(), err)
	}
	return l, nil
}

// Adopt makes a Listener of a TCP listener that exists, such as one that the process was
// given: systemd's, tableflip's, net.FileListener's. NetListenConfig is not used. On
// success tcp belongs to the Listener, whose Close closes it. On an error it is still the
// caller's; the errors are those of Listen.
//
// Other processes may have the same socket, and accept from it: each connection moves to the
// process that has accepted it. Over RDMA one process at a time serves a port; connections
// that others accept stay on TCP.
func (lc *ListenConfig) Adopt(tcp *net.TCPListener) (*Listener, error) {
	raw, err := tcp.SyscallConn()
	if err == nil {
		err = raw.Control(func(uintptr) {}) // nil, or closed
	}
	if err != nil {
		return nil, serverError("listen", "tcp", nil, err)
	}
	o, err := lc.opening()
	var l *Listener
	if err == nil {
		undernet.Release(tcp)
		l, err = o.around(tcp)
	}
	if err != nil {
		return nil, serverError("listen", "tcp", tcp.Addr(), err)
	}
	return l, nil
}

// opening is what a listener has besides TCP.
type opening struct {
	choice    moving.Choice // its settings without what the TCP listener determines
	policy    Policy
	backlog   int
	condition moving.Condition
}

// opening returns what the configuration and the environment set.
func (lc *ListenConfig) opening() (o opening, err error) {
	o.policy = lc.Policy
	if decide := lc.Condition; decide != nil {
		o.condition = func(ends tcpid.Ends, provider string, uid int64) error {
			local, remote := net.TCPAddrFromAddrPort(ends.Local), net.TCPAddrFromAddrPort(ends.Remote)
			return decide(MoveProposal{local, remote, provider, uid})
		}
	}
	o.backlog = min(lc.Backlog, maxBacklog)
	if o.backlog <= 0 {
		o.backlog = defaultBacklog
	}
	o.choice, err = choose(lc.Policy, lc.Providers, lc.Options, lc.RDMA, lc.ShmDir)
	return o, err
}

// hold has a connection that this process has accepted found, until Close.
func (o *opening) hold(tcp *net.TCPConn) (io.Closer, error) {
	for _, p := range o.choice.Providers {
		if held, err := p.Hold(tcp, o.choice.Settings); held != nil || err != nil {
			return held, err // shm's; there is no other
		}
	}
	return nil, errOnlyListeners
}

var errOnlyListeners = &Unavailable{Reason: ReasonNotServed, Err: errors.New("its provider finds listeners alone")}

// around makes a Listener, and opens the providers' parts of it.
func (o opening) around(tcp *net.TCPListener) (*Listener, error) {
	o.choice.Settings.Zone = cmp.Or(o.choice.Settings.Zone, tcp.Addr().(*net.TCPAddr).Zone)
	o.choice.Settings.Namespace = tcpid.Namespace(tcp)
	l := &Listener{tcp: tcp, opening: o, lacks: make(map[string]*Unavailable), parts: &parts{release: func() {}}}
	if release, err := tcpid.Hold(tcp); err == nil { // otherwise each move opens what queries the kernel
		l.release = release
	}
	l.choice.Providers = nil
	for _, p := range o.choice.Providers {
		a, err := p.Listen(tcp, o.choice.Settings)
		if err != nil {
			l.lack(p.Name(), err)
			continue
		}
		l.choice.Providers = append(l.choice.Providers, p)
		l.acceptors = append(l.acceptors, a)
	}
	l.countLacks()
	if len(l.acceptors) > 0 {
		l.choice.Without = nil
	} else if o.policy == Require {
		l.release()
		return nil, requireError{l.choice.Without}
	}
	if o.policy == Require {
		l.required = require(tcp, l.opening)
	}
	runtime.AddCleanup(l, (*parts).forgotten, l.parts)
	return l, nil
}

// Listener accepts connections on one address. Its methods may be called concurrently.
type Listener struct {
	opening // providers: those that it has
	tcp     *net.TCPListener
	*parts
	lacks map[string]*Unavailable // why it does not have a provider, by its name
}

// parts are what a listener has going on. They do not hold the listener: one that the program
// forgets without Close, as servers do that make one for each transfer, has them closed, as net
// closes TCP's.
type parts struct {
	acceptors []moving.Acceptor // of its providers
	release   func()            // of tcpid.Hold
	closing   sync.Once
	required  *required // with the policy Require, else nil
}

func (p *parts) close() (err error) {
	p.closing.Do(func() {
		for _, a := range p.acceptors {
			err = errors.Join(err, a.Close())
		}
		p.release()
		if p.required != nil {
			p.required.close()
		}
	})
	return err
}

// forgotten closes them in the background: all cleanups of the process wait for each other.
func (p *parts) forgotten() { go p.close() }

// Accept waits for the next connection and returns a *sanconn.Conn, or a *net.TCPConn if the
// listener has no SAN. Its errors are those of TCP's Accept.
func (l *Listener) Accept() (net.Conn, error) {
	if l.required != nil {
		return l.required.accept(l)
	}
	tcp, err := l.tcp.AcceptTCP()
	if err != nil {
		return nil, err
	}
	return l.accepted(tcp), nil
}

// accepted returns what Accept does for a connection that TCP has accepted.
func (l *Listener) accepted(tcp *net.TCPConn) net.Conn {
	if len(l.acceptors) == 0 {
		return plain(tcp, l.choice.Without, false)
	}
	return l.takeOn(tcp)
}

// takeOn has a connection found that a listener has accepted, also once the listener is
// closed.
func (o *opening) takeOn(tcp *net.TCPConn) *sanconn.Conn {
	held, _ := o.hold(tcp)
	its := &moving.Life{Held: held, Condition: o.condition}
	return its.TakeOn(tcp, newconn.Config{Threshold: moving.FirstUse / 2}) // its dialer, which begins, counts as well
}

// Addr is the TCP listener's address, a *net.TCPAddr.
func (l *Listener) Addr() net.Addr { return l.tcp.Addr() }

// Providers returns the names of the SAN providers that connections may move to.
func (l *Listener) Providers() []string {
	var names []string
	for i, a := range l.acceptors {
		if _, all := a.Lacks(); !all {
			names = append(names, l.choice.Providers[i].Name())
		}
	}
	return names
}

// Unavailable returns why connections may not move to the other providers that were
// to be used, by name. Another process may have the port on the SAN, for example: it is an
// error that wraps EADDRINUSE, until that one ends; what there was no room for is tried again.
// With a ShmDir that cannot be used, shm is here and among Providers: it serves this network
// namespace alone.
func (l *Listener) Unavailable() map[string]*Unavailable {
	lacks := maps.Clone(l.lacks)
	for i, a := range l.acceptors {
		if why, _ := a.Lacks(); why != nil {
			lacks[l.choice.Providers[i].Name()] = reason.Of(why)
		}
	}
	return lacks
}

// SetDeadline makes Accept fail with os.ErrDeadlineExceeded from t on; the
// zero time means never.
func (l *Listener) SetDeadline(t time.Time) error {
	if l.required != nil {
		return l.required.setDeadline(t)
	}
	return l.tcp.SetDeadline(t)
}

// SyscallConn gives access to the TCP listener's socket.
func (l *Listener) SyscallConn() (syscall.RawConn, error) { return l.tcp.SyscallConn() }

// File returns a copy of the TCP listener's descriptor, to be handed to another
// process; see net.TCPListener.File. Which process accepts a connection is the kernel's
// choice; it moves to that one if that makes a Listener of the descriptor by
// ListenConfig.Adopt.
func (l *Listener) File() (*os.File, error) { return l.tcp.File() }

// Close ends the listener. Connections that Accept has returned live on; those that wait are
// reset, unless other processes have the same socket. With the policy Require those that were
// taken out of it, and wait here, are reset in any case. Over shm, those that were accepted may
// still move afterwards.
func (l *Listener) Close() error {
	err := l.tcp.Close()
	if sans := l.parts.close(); sans != nil {
		err = errors.Join(err, sans)
	}
	return err
}

// zoneOf returns the zone of an address literal. The kernel does not return the zone of an
// MPTCP listener, which is what net makes by default.
func zoneOf(address string) string {
	host, _, _ := net.SplitHostPort(address)
	a, _ := netip.ParseAddr(host)
	return a.Zone()
}

// isAbsent reports whether a reason means that the host or the address has no such SAN,
// which is not a failure.
func isAbsent(r Reason) bool { return r == ReasonNotServed || r == ReasonNoProvider }

// lack records why the listener does not have a provider.
func (l *Listener) lack(provider string, err error) {
	why := reason.Of(err)
	l.lacks[provider] = why
	if l.choice.Without == nil || isAbsent(l.choice.Without.Reason) && !isAbsent(why.Reason) {
		l.choice.Without = why
	}
}

// countLacks counts what the listener lacks.
func (l *Listener) countLacks() {
	lacks := l.Unavailable()
	moving.Count(func(n *moving.Counters) {
		if len(l.acceptors) == 0 && (len(l.lacks) == 0 || isAbsent(l.choice.Without.Reason)) {
			n.Listeners[l.choice.Without.Reason]++
		}
		for _, why := range lacks {
			if !isAbsent(why.Reason) {
				n.Listeners[why.Reason]++
			}
		}
	})
}
