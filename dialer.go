package san

import (
	"context"
	"net"
	"time"

	"github.com/sanconn/san/internal/moving"
	"github.com/sanconn/san/internal/undernet"
	"github.com/sanconn/san/sanconn"
)

// Dial connects to the address as net.Dial does. The connection begins on TCP, and moves to a SAN if
// there is one and that pays. It is the same as new(Dialer).Dial.
func Dial(network, address string) (net.Conn, error) {
	return zeroDialer.Dial(network, address)
}

var zeroDialer Dialer // a new one for each dial would allocate 288 bytes

// Dialer connects to addresses, with connections that may move to a SAN. The zero value is ready for
// use. Its methods may be called concurrently; its fields must not be changed meanwhile.
type Dialer struct {
	// NetDialer makes the TCP connections, on which all connections begin.
	NetDialer net.Dialer

	// Policy is what to do if there is no SAN. The default is Prefer.
	Policy Policy

	// Providers are the providers to which connections may move, in order of preference: "shm",
	// "verbs". Nil means all that this build and this host have, in the order of SAN_PROVIDERS if that
	// is set. Empty means none. If SAN_PROVIDERS is set, providers that it does not name are not used.
	// With an unknown name each dial on a TCP network fails.
	Providers []string

	// Options tune connections over a SAN.
	Options sanconn.Options

	// RDMA is how connections over RDMA are made.
	RDMA RDMA

	// ShmDir is the absolute path of a directory, mounted at both ends, through which connections to
	// other network namespaces of this host move to shared memory. docs/CONTAINERS.md tells what the
	// directory must be like, and whom it trusts. Default: SAN_SHM_DIR, or none.
	ShmDir string
}

// Dial connects to the address; see DialContext.
func (d *Dialer) Dial(network, address string) (net.Conn, error) {
	return d.DialContext(context.Background(), network, address)
}

// DialContext connects to the address as NetDialer.DialContext does, and takes the same networks and
// addresses. The connection is a *sanconn.Conn around NetDialer's connection, and begins on TCP. Once
// it has been used enough for a move to pay, it moves to a SAN in the background, if its other end can
// move, too. With Options.MoveAtOnce the first attempt is made at once. InfoOf returns what carries a
// connection, and why it has not moved; Stats counts both.
//
// With the policy Require no byte goes by TCP. Then DialContext returns when both directions have
// moved, for which the peer must have accepted the connection. It waits until ctx ends or the other end
// has closed the connection, at most for Options.AttemptTimeout, or 10 s if that is not set. If the
// connection has not moved by then, the error gives the reason: errors.As finds an *Unavailable in it.
// If a program at either end uses the descriptor later (File, or SyscallConn's Control), the connection
// goes back to TCP.
//
// With the policy Never, or if there is no provider, the connection is NetDialer's own. All errors are
// *net.OpError, as net's are.
func (d *Dialer) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	if ctx == nil {
		panic("nil context")
	}
	p, err := d.plan(network)
	if err != nil {
		return nil, dialError(network, nil, nil, err)
	}
	if p.Without != nil && d.Policy == Require {
		return nil, dialError(network, d.NetDialer.LocalAddr, nil, requireError{p.Without})
	}
	began := time.Now()
	c, err := d.NetDialer.DialContext(undernet.Plain(ctx), network, address)
	if err != nil {
		return nil, err
	}
	tcp, ok := c.(*net.TCPConn)
	if p.Without != nil || !ok {
		return plain(c, p.Without, true), nil
	}
	conn := p.Begin(tcp, began)
	if d.Policy == Require {
		ctx, cancel := context.WithTimeout(ctx, p.Settings.Attempt)
		defer cancel()
		if why := p.MoveNow(ctx, conn); why != nil {
			moving.LifeOf(conn).Failed(why)
			conn.SetLinger(0)
			conn.Close()
			return nil, dialError(network, tcp.LocalAddr(), tcp.RemoteAddr(), requireError{why})
		}
		return conn, nil
	}
	p.MoveAtOnce(conn)
	return conn, nil
}

// plan returns how connections of a network move, or an error if the settings are wrong.
func (d *Dialer) plan(network string) (p *moving.Plan, err error) {
	if !isTCP(network) {
		return &moving.Plan{Choice: moving.Choice{Without: notTCP(network)}}, nil
	}
	p = &moving.Plan{AtOnce: d.Options.MoveAtOnce || processEnvironment().MoveAtOnce}
	p.Choice, err = choose(d.Policy, d.Providers, d.Options, d.RDMA, d.ShmDir)
	return p, err
}
