package san

import (
	"context"
	"maps"
	"net"
	"os"
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
	o, err := lc.opening()
	if err != nil {
		return nil, listenError(network, nil, err)
	}
	tries := 1
	if _, port, err := net.SplitHostPort(address); err == nil && (port == "" || port == "0") {
		tries = portTries
	}
	for try := 1; ; try++ {
		l, err := lc.listen(ctx, network, address, o, try < tries)
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
	acceptors []opened
	without   *Unavailable            // why there is no acceptor; nil if there is one
	lacks     map[string]*Unavailable // why it does not have a provider, by its name

	plain    chan net.Conn      // from TCP: handed to a waiting Accept
	failed   chan error         // … or the error of TCP's Accept
	ready    chan *sanconn.Conn // negotiated: room for the whole backlog
	left     chan net.Conn      // from TCP: taken, but not handed over before Close
	backlog  *backlog.Backlog   // of those that negotiate or are ready
	deadline acceptDeadline

	startTCP   sync.Once
	ctx        context.Context // ends at Close, and ends the negotiations
	cancel     context.CancelFunc
	accepting  atomic.Bool // Accept was called
	handed     atomic.Bool // File was called
	shared     atomic.Bool // other processes may have the socket: File was called, or it was adopted
	closing    atomic.Bool
	closed     chan struct{}
	settled    chan struct{} // closed when all that Close leaves to Accept is there
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
		return l.acceptLeft()
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
		return l.acceptedSAN(c), nil
	case c := <-l.plain:
		return l.acceptedTCP(c), nil
	case err := <-l.failed:
		return nil, err
	case <-l.closed:
		return l.acceptLeft()
	case <-expired:
		return nil, l.acceptError(os.ErrDeadlineExceeded)
	}
}

// acceptLeft is Accept after Close. Where other processes share the socket it first returns
// what had come by then.
func (l *Listener) acceptLeft() (net.Conn, error) {
	if l.shared.Load() {
		<-l.settled
		select {
		case c := <-l.ready:
			return l.acceptedSAN(c), nil
		case c := <-l.left:
			return l.acceptedTCP(c), nil
		default:
		}
	}
	return nil, l.acceptError(net.ErrClosed)
}

func (l *Listener) acceptedSAN(c *sanconn.Conn) net.Conn {
	raceedge.Acquire()
	l.backlog.Leave()
	count(func(n *Counters) { n.Accepted[c.Provider()]++ })
	return c
}

func (l *Listener) acceptedTCP(c net.Conn) net.Conn {
	why := l.without
	if why == nil {
		why = &Unavailable{Reason: ReasonPeerPlain}
	}
	noteFallback(c, why)
	count(func(n *Counters) { n.Accepted[providerTCP]++ })
	return c
}

// Addr is the TCP listener's address, a *net.TCPAddr; the SANs' is the same.
func (l *Listener) Addr() net.Addr { return l.tcp.Addr() }

// Providers returns the names of the SAN providers that the listener has beside TCP.
func (l *Listener) Providers() []string {
	var names []string
	for _, a := range l.acceptors {
		if a.Waiting() == nil {
			names = append(names, a.name)
		}
	}
	return names
}

// Unavailable returns why the listener does not have the other providers that were
// to be used, by name. Another program may have the port on the SAN, for example:
// that is not always TCP's port. What a listener that was adopted will have once another
// process ends its own is an error that wraps EADDRINUSE.
func (l *Listener) Unavailable() map[string]*Unavailable {
	lacks := maps.Clone(l.lacks)
	for _, a := range l.acceptors {
		if err := a.Waiting(); err != nil {
			lacks[a.name] = lackOf(err)
		}
	}
	return lacks
}

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
// process; see net.TCPListener.File. If that process makes a Listener of it by
// ListenConfig.Adopt, it gets the SAN connections once this one is closed. If
// this process has not called Accept, all connections go to the other one, by TCP.
func (l *Listener) File() (*os.File, error) {
	l.handed.Store(true)
	l.shared.Store(true)
	return l.tcp.File()
}

// acceptError is err as net would return it, or net.ErrClosed if the listener is closed.
func (l *Listener) acceptError(err error) error {
	if l.closing.Load() {
		err = net.ErrClosed
	}
	return &net.OpError{Op: "accept", Net: l.Addr().Network(), Addr: l.Addr(), Err: err}
}
