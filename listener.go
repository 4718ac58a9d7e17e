package san

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sanconn/san/internal/backlog"
	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/session"
)

const (
	// defaultBacklog is how many connections may wait for Accept. Each holds
	// the provider's smallest buffers, so it is less than TCP's 4096.
	defaultBacklog = 1024
	// maxBacklog bounds Backlog, for which room is allocated at once. It was long the
	// limit of listen(2).
	maxBacklog = 1 << 16

	// negotiateTimeout bounds how long a dialer may take to negotiate, even with busy
	// processors at both ends. Meanwhile it holds a place in the backlog, for less time
	// if that is full (see backlog.Slow).
	negotiateTimeout = 10 * time.Second

	// If a provider's accept fails, most likely for lack of resources, it is called again
	// after a delay that doubles within these bounds, as in net/http.
	minAcceptDelay = 5 * time.Millisecond
	maxAcceptDelay = time.Second
)

// Listen listens on the address as net.Listen does, for TCP and for the SANs
// of this host. It is the same as Listen of a zero ListenConfig.
func Listen(network, address string) (net.Listener, error) {
	return new(ListenConfig).Listen(context.Background(), network, address)
}

// ListenConfig has the settings of a listener. The zero value is ready for
// use. Its methods may be called concurrently; its fields must not be changed
// meanwhile.
type ListenConfig struct {
	// NetListenConfig opens the TCP listener, which is always there. Its Control
	// hook sees that socket alone. Its KeepAlive and KeepAliveConfig apply to TCP
	// alone: for a SAN there is Options.KeepAlive.
	NetListenConfig net.ListenConfig

	// Policy: with Prefer, the default, connections over SANs and over TCP are
	// accepted. With Require TCP connections are reset, and Listen fails if there
	// is no SAN. With Never there is TCP alone.
	Policy Policy

	// Providers are the providers to listen on: "shm", "verbs". Nil means all that
	// this build and this host have; empty means none. SAN_PROVIDERS restricts them
	// in any case. With an unknown name Listen fails.
	Providers []string

	// Backlog is how many SAN connections may wait for Accept; more are
	// refused at once. Default 1024, at most 65536. TCP has its own.
	Backlog int

	// Options tune connections over a SAN.
	Options sanconn.Options

	// RDMA says how connections over RDMA are made.
	RDMA RDMA
}

// Listen opens a TCP listener and, on the same address, a listener of each
// provider that serves it. For tcp, tcp4 and tcp6 the result is a *Listener;
// other networks are left to net, or fail if the policy is Require.
//
// That a provider cannot listen is no error; Stats counts it, and
// Listener.Unavailable tells why. Only if the policy is Require and no provider can,
// Listen fails: errors.As finds an *Unavailable. ctx is for looking up the address;
// when it ends, the listener lives on.
func (lc *ListenConfig) Listen(ctx context.Context, network, address string) (net.Listener, error) {
	if !isTCP(network) {
		if lc.Policy == Require {
			return nil, listenError(network, nil, requireError{notTCP(network)})
		}
		count(func(n *Counters) { n.Listeners[ReasonNetwork]++ })
		return lc.NetListenConfig.Listen(ctx, network, address)
	}
	env := processEnvironment()
	providers, why, err := choose(lc.Providers, env, registry)
	if err != nil {
		return nil, listenError(network, nil, err)
	}
	if lc.Policy == Never {
		providers, why = nil, &Unavailable{Reason: ReasonPolicy}
	}
	tries := 1
	if _, port, err := net.SplitHostPort(address); err == nil && (port == "" || port == "0") {
		tries = portTries
	}
	for try := 1; ; try++ {
		l, err := lc.listen(ctx, network, address, providers, why, env, try < tries)
		if err != errPortTaken {
			return l, err
		}
	}
}

// portTries is how many ports are tried: one that is free for TCP may be taken on a SAN.
const portTries = 4

var errPortTaken = errors.New("san: the port is taken on a SAN's side")

// listen is Listen for TCP. If anyPort is set and a SAN finds TCP's port taken, the error
// is errPortTaken.
func (lc *ListenConfig) listen(ctx context.Context, network, address string, providers []provider, why *Unavailable, env environment, anyPort bool) (net.Listener, error) {
	inner, err := lc.NetListenConfig.Listen(ctx, network, address)
	if err != nil {
		return nil, err
	}
	places := min(lc.Backlog, maxBacklog)
	if places <= 0 {
		places = defaultBacklog
	}
	settings := settle(lc.Options, lc.RDMA, lc.Policy, env, places)
	tcp := inner.(*net.TCPListener)
	settings.v6only = network == "tcp6" || v6only(tcp)
	settings.zone = zoneOf(address)
	l := &Listener{
		tcp:     tcp,
		policy:  lc.Policy,
		plain:   make(chan net.Conn),
		failed:  make(chan error),
		ready:   make(chan *sanconn.Conn, places),
		backlog: backlog.New(places),
		closed:  make(chan struct{}),
		without: why,
		lacks:   make(map[string]*Unavailable),
	}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	for _, p := range providers {
		a, err := p.listen(l.tcp, settings)
		switch {
		case anyPort && errors.Is(err, syscall.EADDRINUSE):
			l.Close()
			return nil, errPortTaken
		case err != nil:
			l.lack(p.name(), err)
		default:
			l.providers = append(l.providers, p.name())
			l.acceptors = append(l.acceptors, a)
			l.background.Go(func() { l.serve(p.name(), a, settings.session) })
		}
	}
	l.countLacks()
	if len(l.acceptors) > 0 {
		l.without = nil
		return l, nil
	}
	if lc.Policy == Require {
		addr := l.tcp.Addr()
		l.Close()
		return nil, listenError(network, addr, requireError{l.without})
	}
	return l, nil
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
	why, final := verdict(context.Background(), err)
	if final != nil {
		why = &Unavailable{Reason: ReasonUnreachable, Err: final}
	}
	l.lacks[provider] = why
	if l.without == nil || isAbsent(l.without.Reason) && !isAbsent(why.Reason) {
		l.without = why
	}
}

// countLacks counts what the listener lacks.
func (l *Listener) countLacks() {
	count(func(n *Counters) {
		if len(l.acceptors) == 0 && (len(l.lacks) == 0 || isAbsent(l.without.Reason)) {
			n.Listeners[l.without.Reason]++
		}
		for _, why := range l.lacks {
			if !isAbsent(why.Reason) {
				n.Listeners[why.Reason]++
			}
		}
	})
}

// Listener accepts connections from TCP and from SANs on one address. Its
// methods may be called concurrently.
type Listener struct {
	tcp       *net.TCPListener
	policy    Policy
	providers []string
	acceptors []acceptor
	without   *Unavailable            // why there is no acceptor; nil if there is one
	lacks     map[string]*Unavailable // why it does not have a provider, by its name

	plain    chan net.Conn      // from TCP: handed to a waiting Accept
	failed   chan error         // … or the error of TCP's Accept
	ready    chan *sanconn.Conn // negotiated: room for the whole backlog
	backlog  *backlog.Backlog   // of those that negotiate or are ready
	deadline acceptDeadline

	startTCP   sync.Once
	ctx        context.Context // ends at Close, and ends the negotiations
	cancel     context.CancelFunc
	accepting  atomic.Bool // Accept was called
	handed     atomic.Bool // File was called
	closing    atomic.Bool
	closed     chan struct{}
	background sync.WaitGroup
}

// Accept waits for the next connection, over a SAN or over TCP, and returns a
// *sanconn.Conn or a *net.TCPConn. The error is net.ErrClosed after Close,
// os.ErrDeadlineExceeded after the deadline, or one that TCP's Accept returns; each in
// a *net.OpError.
func (l *Listener) Accept() (net.Conn, error) {
	// TCP connections are taken from the first Accept on, not before: a listener that was
	// made only to be handed to another process by File must take none from it.
	l.accepting.Store(true)
	l.startTCP.Do(func() {
		if !l.closing.Load() {
			l.background.Go(l.serveTCP)
		}
	})
	expired := l.deadline.wait()
	select {
	case <-l.closed:
		return nil, l.acceptError(net.ErrClosed)
	case <-expired:
		return nil, l.acceptError(os.ErrDeadlineExceeded)
	default:
	}
	select {
	case <-l.failed: // from before this call: try TCP again, as it may work by now
	default:
	}
	select {
	case c := <-l.ready:
		l.backlog.Leave()
		count(func(n *Counters) { n.Accepted[c.Provider()]++ })
		return c, nil
	case c := <-l.plain:
		why := l.without
		if why == nil {
			why = &Unavailable{Reason: ReasonPeerPlain}
		}
		noteFallback(c, why)
		count(func(n *Counters) { n.Accepted[providerTCP]++ })
		return c, nil
	case err := <-l.failed:
		return nil, err
	case <-l.closed:
		return nil, l.acceptError(net.ErrClosed)
	case <-expired:
		return nil, l.acceptError(os.ErrDeadlineExceeded)
	}
}

// serveTCP hands TCP's connections and errors to Accept, one at a time: the others stay in
// the kernel's backlog.
func (l *Listener) serveTCP() {
	for {
		c, err := l.tcp.Accept()
		if err != nil {
			select {
			case l.failed <- err:
				continue
			case <-l.closed:
				return
			}
		}
		if l.policy == Require {
			reset(c)
			count(func(n *Counters) { n.Refused++ })
			continue
		}
		select {
		case l.plain <- c:
		case <-l.closed:
			reset(c)
			return
		}
	}
}

// reset resets a TCP connection that nobody accepts, as the kernel does with those in its
// backlog: the dialer must not take an orderly end for an answer.
func reset(c net.Conn) {
	c.(*net.TCPConn).SetLinger(0)
	c.Close()
}

// serve accepts a provider's connections and has them negotiated in the
// background, so that a slow dialer delays nobody.
func (l *Listener) serve(provider string, a acceptor, config session.Config) {
	delay := minAcceptDelay
	for {
		t, err := a.accept()
		switch {
		case l.closing.Load():
			if err == nil {
				turnAway(t)
			}
			return
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil:
			select {
			case <-time.After(delay):
			case <-l.closed:
				return
			}
			delay = min(2*delay, maxAcceptDelay)
			continue
		}
		delay = minAcceptDelay
		if l.handed.Load() && !l.accepting.Load() {
			turnAway(t)
			continue
		}
		p, evicted := l.backlog.Begin(l.ctx, negotiateTimeout)
		if p == nil {
			refuse(t) // C7
			continue
		}
		if evicted {
			count(func(n *Counters) { n.Refused++ })
		}
		l.background.Go(func() { l.admit(p, provider, t, config) })
	}
}

// refuse ends a connection before it is negotiated: its dialer sees
// ECONNREFUSED.
func refuse(t transport) {
	t.endpoint.Abort()
	t.release()
	count(func(n *Counters) { n.Refused++ })
}

// turnAway ends a connection before it is negotiated, so that its dialer falls back to TCP,
// where another process may still listen. For buffered providers a reset would mean that
// it is refused (see negotiate), and Close does not wait, so they close it instead.
func turnAway(t transport) {
	if t.endpoint.Limits().Buffered {
		t.endpoint.Close()
	} else {
		t.endpoint.Abort()
	}
	t.release()
}

// admit negotiates one connection and queues it for Accept.
func (l *Listener) admit(p *backlog.Place, provider string, t transport, config session.Config) {
	s, err := negotiate(p.Context(), t, config)
	switch placed := p.End(err == nil); {
	case placed:
		l.ready <- newConn(provider, s, t) // never blocks: it has a place in the backlog
	case err == nil:
		s.Abort()
		t.release()
	}
}

// Close ends the listener. Connections that wait for Accept are reset; those that
// were accepted live on. It waits for the negotiations under way to end.
func (l *Listener) Close() error {
	if l.closing.Swap(true) {
		return &net.OpError{Op: "close", Net: l.Addr().Network(), Addr: l.Addr(), Err: net.ErrClosed}
	}
	close(l.closed)
	l.cancel()
	err := l.tcp.Close()
	for _, a := range l.acceptors {
		err = cmp.Or(err, a.Close())
	}
	l.startTCP.Do(func() {}) // a later Accept must start nothing
	l.background.Wait()
	for {
		select {
		case c := <-l.ready:
			c.SetLinger(0)
			c.Close()
		default:
			return err
		}
	}
}

// Addr is the TCP listener's address, a *net.TCPAddr; the SANs' is the same.
func (l *Listener) Addr() net.Addr { return l.tcp.Addr() }

// Providers returns the names of the SAN providers that the listener has beside TCP.
func (l *Listener) Providers() []string { return slices.Clone(l.providers) }

// Unavailable returns why the listener does not have the other providers that were
// to be used, by name. Another program may have the port on the SAN, for example:
// that is not always TCP's port.
func (l *Listener) Unavailable() map[string]*Unavailable { return maps.Clone(l.lacks) }

// SetDeadline makes Accept fail with os.ErrDeadlineExceeded from t on; the
// zero time means never.
func (l *Listener) SetDeadline(t time.Time) error {
	if l.closing.Load() {
		return &net.OpError{Op: "set", Net: l.Addr().Network(), Addr: l.Addr(), Err: net.ErrClosed}
	}
	l.deadline.set(t)
	return nil
}

// SyscallConn gives access to the TCP listener's socket.
func (l *Listener) SyscallConn() (syscall.RawConn, error) { return l.tcp.SyscallConn() }

// File returns a copy of the TCP listener's descriptor, to be handed to another
// process; see net.TCPListener.File. That process accepts TCP connections alone. If
// this process has not called Accept, all connections go to the other one, by TCP.
// Otherwise accept the SAN connections that are waiting before Close, which resets
// them.
func (l *Listener) File() (*os.File, error) {
	l.handed.Store(true)
	return l.tcp.File()
}

// acceptError is err as net would return it, or net.ErrClosed if the listener is closed.
func (l *Listener) acceptError(err error) error {
	if l.closing.Load() {
		err = net.ErrClosed
	}
	return &net.OpError{Op: "accept", Net: l.Addr().Network(), Addr: l.Addr(), Err: err}
}
