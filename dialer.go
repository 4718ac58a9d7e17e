package san

import (
	"context"
	"net"
	"time"

	"github.com/sanconn/san/internal/moving"
	"github.com/sanconn/san/internal/undernet"
	"github.com/sanconn/san/sanconn"
)

// Dial connects to the address as net.Dial does, over a SAN where there is
// one. It is the same as new(Dialer).Dial.
func Dial(network, address string) (net.Conn, error) {
	return zeroDialer.Dial(network, address)
}

var zeroDialer Dialer // one for each dial would be an allocation of 288 bytes

// Dialer connects to addresses, over a SAN where there is one. The zero value
// is ready for use. Its methods may be called concurrently; its fields must not be
// changed meanwhile.
type Dialer struct {
	// NetDialer makes the TCP connections, on which all connections begin.
	NetDialer net.Dialer

	// Policy is what to do where there is no SAN. The default is Prefer.
	Policy Policy

	// Providers are the providers to move connections to, in order of preference: "shm",
	// "verbs". Nil means all that this build and this host have, in the order of
	// SAN_PROVIDERS if that is set; empty means none. SAN_PROVIDERS restricts them
	// in any case. With an unknown name each dial on a TCP network fails.
	Providers []string

	// Options tune connections over a SAN.
	Options sanconn.Options

	// RDMA is how connections over RDMA are made.
	RDMA RDMA

	// ShmDir is a directory through which connections to other network namespaces of this
	// host move to shared memory: an absolute path, mounted at both ends. What it has to be,
	// and whom it trusts, is in docs/CONTAINERS.md. Default: SAN_SHM_DIR, or none.
	ShmDir string
}

// Dial connects to the address; see DialContext.
func (d *Dialer) Dial(network, address string) (net.Conn, error) {
	return d.DialContext(context.Background(), network, address)
}

// DialContext connects to the address as NetDialer.DialContext does, and takes
// the same networks and addresses. The connection is a *sanconn.Conn around NetDialer's. It
// begins on TCP. Once it has been used enough for that to pay, it moves to a SAN in the
// background if its other end can, too; Options.MoveAtOnce has it try at once. InfoOf returns
// what carries it, and why it has not moved; Stats counts both.
//
// With the policy Require no byte goes by TCP: DialContext returns when both directions have
// moved, which takes a peer that has accepted the connection. It waits for that within ctx, for
// at most Options.AttemptTimeout or 10 s, and no longer once the other end has closed the
// connection. The reason is the error otherwise: errors.As finds an *Unavailable in it. A program,
// of either end, that uses the descriptor later (File, or SyscallConn's Control) takes the
// connection back to TCP. With the policy Never, and where there is no provider, the connection is
// NetDialer's own. All errors are *net.OpError, as net's are.
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

// plan returns how connections of a network move, or why they do not.
func (d *Dialer) plan(network string) (p *moving.Plan, err error) {
	if !isTCP(network) {
		return &moving.Plan{Choice: moving.Choice{Without: notTCP(network)}}, nil
	}
	p = &moving.Plan{AtOnce: d.Options.MoveAtOnce || processEnvironment().MoveAtOnce}
	p.Choice, err = choose(d.Policy, d.Providers, d.Options, d.RDMA, d.ShmDir)
	return p, err
}
