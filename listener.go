package san

import (
	"cmp"
	"context"
	"maps"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sanconn/san/internal/backlog"
	"github.com/sanconn/san/internal/raceedge"
	"github.com/sanconn/san/sanconn"
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

	// RDMA is how connections over RDMA are made.
	RDMA RDMA
}

// Listen opens a TCP listener and, on the same address, a listener of each
// provider that serves it. For tcp, tcp4 and tcp6 the result is a *Listener;
// other networks are left to net, or fail if the policy is Require.
//
// That a provider cannot listen is no error; Stats counts it, and
// Listener.Unavailable has the reason. Only if the policy is Require and no provider can,
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
		raceedge.Acquire()
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
