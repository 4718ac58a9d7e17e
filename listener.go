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

// Listen listens on the address as net.Listen does, for connections that begin on TCP and may move to
// the SANs of this host. It is the same as Listen of a zero ListenConfig.
func Listen(network, address string) (net.Listener, error) {
	return new(ListenConfig).Listen(context.Background(), network, address)
}

// ListenConfig has the settings of a listener. The zero value is ready for use. Its methods may be
// called concurrently; its fields must not be changed meanwhile.
type ListenConfig struct {
	// NetListenConfig opens the TCP listener. If this host has an RDMA device that may be used, or
	// there is a ShmDir, Multipath TCP is switched off: see docs/SECURITY.md.
	NetListenConfig net.ListenConfig

	// Policy: with Prefer, the default, all connections are accepted, and move if they can. With
	// Require, Accept returns only connections that have moved before a byte was read or written;
	// others are reset, after 10 s at the latest, and Listen fails if there is no SAN. With Never there
	// is only TCP.
	Policy Policy

	// Providers are the providers to which connections may move: "shm", "verbs". Nil means all that
	// this build and this host have. Empty means none. If SAN_PROVIDERS is set, providers that it does
	// not name are not used. With an unknown name Listen on a TCP network fails.
	Providers []string

	// Backlog is how many connections may be moving or waiting for Accept, with the policy Require. A
	// connection that does not move counts until it is reset. A further connection waits for room: then
	// the oldest connection without a proposal for 5 s is reset. Connections behind the waiting one are
	// in TCP's backlog, which is not this one. Default 1024, at most 65536.
	Backlog int

	// Condition, if not nil, decides for each connection whether it may move to a SAN, when its dialer
	// proposes that. An error refuses the move; so does a Condition that ends its goroutine
	// (runtime.Goexit) instead of returning. The connection belongs to the program already, and stays
	// on TCP, with ReasonRefused at both ends; the dialer does not propose it again. If the dialer's
	// policy is Require, its Dial fails with an error that matches syscall.ECONNREFUSED. If this
	// listener's policy is Require, Accept does not return the connection, which is reset after 10 s.
	//
	// Condition is called for each provider that is tried, in several goroutines at a time, without a
	// lock. While it blocks, the connection does not move, and goes on by TCP. Only the ends of its
	// streams (the dialer's CloseWrite, and what its Read finds at the end) and the dialer's use of the
	// descriptor wait for Condition, at most half a second. A dialer waits for 2 s, or up to 10 s with
	// Require; a later decision is used when the dialer next tries to move the connection. Condition
	// may be called after the listener was closed.
	Condition func(MoveProposal) error

	// Options tune connections over a SAN. If a process has several listeners on one port, the Options
	// of the first one are used for all over shm.
	Options sanconn.Options

	// RDMA is how connections over RDMA are made.
	RDMA RDMA

	// ShmDir is like Dialer.ShmDir, for connections from other network namespaces.
	ShmDir string
}

// MoveProposal is what ListenConfig.Condition decides about: the move of a connection that TCP has
// accepted to a SAN.
type MoveProposal struct {
	LocalAddr, RemoteAddr *net.TCPAddr // the connection's addresses at this end, without zones
	Provider              string       // "shm", "verbs"

	// UID is the user of the process at the other end, by the kernel's credentials, if that process is
	// in this network namespace (by shm). Otherwise it is -1.
	UID int64
}

const (
	defaultBacklog = 1024
	maxBacklog     = 1 << 16
)

// stamps reports whether connections may be proved by their stamps.
func (o opening) stamps() bool {
	return slices.ContainsFunc(o.choice.Providers, func(p moving.Provider) bool { return p.Stamps(o.choice.Settings) })
}

// Listen opens a TCP listener, by NetListenConfig, and makes it known to each provider that serves its
// address. For tcp, tcp4 and tcp6 the result is a *Listener. Other networks are left to net, or fail if
// the policy is Require.
//
// It is no error if a provider cannot serve the listener: Listener.Unavailable has the reason, and
// Stats counts it if there is such a SAN. Only if the policy is Require and no provider can, Listen
// fails: errors.As finds an *Unavailable. ctx is for looking up the address; the listener lives on when
// ctx ends.
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

// Adopt makes a Listener from an existing TCP listener, such as one that the process was given:
// systemd's, tableflip's, net.FileListener's. NetListenConfig is not used. On success tcp belongs to
// the Listener, whose Close closes it. After an error it still belongs to the caller; the errors are
// those of Listen.
//
// Other processes may have the same socket and accept from it: each connection moves to the process
// that has accepted it. Over RDMA one process at a time serves a port; connections that other processes
// accept stay on TCP.
func (lc *ListenConfig) Adopt(tcp *net.TCPListener) (*Listener, error) {
	raw, err := tcp.SyscallConn()
	if err == nil {
		err = raw.Control(func(uintptr) {}) // fails if tcp is closed
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
	choice    moving.Choice // the settings, without what the TCP listener determines
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

// hold lets the dialer of an accepted connection find this process, until Close of the result.
func (o *opening) hold(tcp *net.TCPConn) (io.Closer, error) {
	for _, p := range o.choice.Providers {
		if held, err := p.Hold(tcp, o.choice.Settings); held != nil || err != nil {
			return held, err // shm's; no other provider has one
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
	if release, err := tcpid.Hold(tcp); err == nil { // otherwise each move opens a socket for queries
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
	opening // its providers are those that the listener has
	tcp     *net.TCPListener
	*parts
	lacks map[string]*Unavailable // why a provider is missing, by the provider's name
}

// parts are what a listener has running. They do not refer to the listener. If the program drops a
// listener without Close, as servers do that make a listener for each transfer, the parts are closed
// when it is collected, as net closes TCP's.
type parts struct {
	acceptors []moving.Acceptor // of its providers
	release   func()            // releases tcpid.Hold
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

// forgotten closes the parts in the background, because all cleanups of the process wait for each
// other.
func (p *parts) forgotten() { go p.close() }

// Accept waits for the next connection and returns a *sanconn.Conn, or a *net.TCPConn if the listener
// has no SAN. Its errors are those of TCP's Accept.
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

// accepted returns what Accept returns for a connection that TCP has accepted.
func (l *Listener) accepted(tcp *net.TCPConn) net.Conn {
	if l.choice.Without != nil {
		return plain(tcp, l.choice.Without, false)
	}
	return l.takeOn(tcp)
}

// takeOn makes a Conn around an accepted connection, and lets its dialer find it, even after the
// listener is closed.
func (o *opening) takeOn(tcp *net.TCPConn) *sanconn.Conn {
	held, _ := o.hold(tcp)
	its := &moving.Life{Held: held, Condition: o.condition}
	return its.TakeOn(tcp, newconn.Config{Threshold: moving.FirstUse / 2}) // half: the dialer, which begins a move, counts its own use as well
}

// Addr returns the TCP listener's address, a *net.TCPAddr.
func (l *Listener) Addr() net.Addr { return l.tcp.Addr() }

// Providers returns the names of the SAN providers to which connections may move.
func (l *Listener) Providers() []string {
	var names []string
	for i, a := range l.acceptors {
		if _, all := a.Lacks(); !all {
			names = append(names, l.choice.Providers[i].Name())
		}
	}
	return names
}

// Unavailable returns, by provider name, why connections may not move to the other providers that were
// to be used. For example, if another process has the port on the SAN, it is an error that wraps
// EADDRINUSE until that process has ended. If resources were short, the listener tries again. If the
// ShmDir cannot be used, shm is here and also among Providers: it serves this network namespace only.
func (l *Listener) Unavailable() map[string]*Unavailable {
	lacks := maps.Clone(l.lacks)
	for i, a := range l.acceptors {
		if why, _ := a.Lacks(); why != nil {
			lacks[l.choice.Providers[i].Name()] = reason.Of(why)
		}
	}
	return lacks
}

// SetDeadline makes Accept fail with os.ErrDeadlineExceeded from t on. The zero time means no deadline.
func (l *Listener) SetDeadline(t time.Time) error {
	if l.required != nil {
		return l.required.setDeadline(t)
	}
	return l.tcp.SetDeadline(t)
}

// SyscallConn gives access to the TCP listener's socket.
func (l *Listener) SyscallConn() (syscall.RawConn, error) { return l.tcp.SyscallConn() }

// File returns a copy of the TCP listener's descriptor, for another process; see net.TCPListener.File.
// The kernel chooses which process accepts a connection. The connection can move to that process if it
// makes a Listener from the descriptor by ListenConfig.Adopt.
func (l *Listener) File() (*os.File, error) { return l.tcp.File() }

// Close ends the listener. Connections that Accept has returned live on. Connections that wait are
// reset, unless other processes have the same socket. With the policy Require, connections that this
// process has accepted, and that wait here, are reset in any case. Over shm, accepted connections may
// still move afterwards.
func (l *Listener) Close() error {
	err := l.tcp.Close()
	if sans := l.parts.close(); sans != nil {
		err = errors.Join(err, sans)
	}
	return err
}

// zoneOf returns the zone of an address literal. The kernel does not return the zone of an MPTCP
// listener, which net makes by default.
func zoneOf(address string) string {
	host, _, _ := net.SplitHostPort(address)
	a, _ := netip.ParseAddr(host)
	return a.Zone()
}

// isAbsent reports whether a reason means that the host or the address has no such SAN, which is not a
// failure.
func isAbsent(r Reason) bool { return r == ReasonNotServed || r == ReasonNoProvider }

// lack records why the listener does not have a provider.
func (l *Listener) lack(provider string, err error) {
	why := reason.Of(err)
	l.lacks[provider] = why
	if l.choice.Without == nil || isAbsent(l.choice.Without.Reason) && !isAbsent(why.Reason) {
		l.choice.Without = why
	}
}

// countLacks counts the providers that the listener lacks.
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
