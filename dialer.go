package san

import (
	"context"
	"net"
	"net/netip"
	"slices"
	"syscall"
	"time"

	"github.com/sanconn/san/sanconn"
)

// Dial connects to the address as net.Dial does, over a SAN where there is
// one. It is the same as new(Dialer).Dial.
func Dial(network, address string) (net.Conn, error) {
	return new(Dialer).Dial(network, address)
}

// Dialer connects to addresses, over a SAN where there is one. The zero value
// is ready for use. Its methods may be called concurrently; its fields must not be
// changed meanwhile.
type Dialer struct {
	// NetDialer makes the TCP connections. Its Timeout, Deadline, LocalAddr,
	// Resolver, Control and ControlContext apply to attempts over a SAN too. Its
	// hooks then see a TCP socket that holds the connection's local address; when
	// such an attempt fails, they are called again for the socket that TCP uses.
	// KeepAlive, KeepAliveConfig and Cancel, which is deprecated, apply to TCP alone;
	// for a SAN there are Options.KeepAlive and the context.
	NetDialer net.Dialer

	// Policy is what to do where there is no SAN. The default is Prefer.
	Policy Policy

	// Providers are the providers to try, in order of preference: "shm", "verbs".
	// Nil means all that this build and this host have, in the order of
	// SAN_PROVIDERS if that is set; empty means none. SAN_PROVIDERS restricts them
	// in any case. With an unknown name each dial fails.
	Providers []string

	// Options tune connections over a SAN.
	Options sanconn.Options

	// RDMA is how connections over RDMA are made.
	RDMA RDMA
}

// Dial connects to the address; see DialContext.
func (d *Dialer) Dial(network, address string) (net.Conn, error) {
	return d.DialContext(context.Background(), network, address)
}

// DialContext connects to the address as net.Dialer.DialContext does, and takes
// the same networks and addresses. Over a SAN the connection is a *sanconn.Conn.
// Without one it is what NetDialer returns; InfoOf has the reason, and Stats counts
// it. If the policy is Require, the reason is the error: errors.As finds an
// *Unavailable in it. All errors are *net.OpError, as net's are.
//
// If a SAN serves any of a host's addresses, they are tried in turn, each over the SANs
// that serve it and then by TCP, and they share the time until the deadline by net's rule.
// The two address families are then not tried in parallel: before the other family has its
// turn, each address of the first takes up to Options.AttemptTimeout for each SAN and 5 s
// for TCP (no bound if NetDialer's FallbackDelay is negative). If no SAN serves any of them,
// NetDialer connects as it always does (RFC 8305, "Happy Eyeballs"); where the name has
// addresses of both families, it looks them up again.
func (d *Dialer) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	if ctx == nil {
		panic("nil context")
	}
	c, err := d.dial(ctx, network, address)
	if err != nil {
		return nil, err
	}
	return c.counted(), nil
}

func (d *Dialer) dial(ctx context.Context, network, address string) (dialed, error) {
	if !isTCP(network) {
		return d.fallBack(ctx, network, address, notTCP(network), false)
	}
	env := processEnvironment()
	providers, why, err := choose(d.Providers, env, registry)
	if err != nil {
		return dialed{}, dialError(network, nil, netip.AddrPort{}, err)
	}
	if d.Policy == Never {
		why = &Unavailable{Reason: ReasonPolicy}
	}
	if why != nil {
		return d.fallBack(ctx, network, address, why, false)
	}
	ctx, cancel := d.bound(ctx)
	defer cancel()
	requests, err := d.plan(ctx, network, address, providers, env)
	if err != nil {
		return dialed{}, err
	}
	if d.Policy == Require {
		first := requests[0]
		requests = slices.DeleteFunc(requests, func(r request) bool { return !served(r) })
		if len(requests) == 0 {
			why := requireError{notServed(first, providers)}
			return dialed{}, dialError(network, d.NetDialer.LocalAddr, first.remote, why)
		}
	}
	if !slices.ContainsFunc(requests, served) && severalFamilies(requests) {
		return d.fallBack(ctx, network, address, &Unavailable{Reason: ReasonNotServed}, false)
	}
	return d.dialEach(ctx, network, requests)
}

// dialed is a connection, and how it was made.
type dialed struct {
	net.Conn
	why *Unavailable // why it is not over a SAN; nil if it is
}

// counted counts the connection and returns it for the application.
func (c dialed) counted() net.Conn {
	if c.why != nil {
		noteFallback(c.Conn, c.why)
	}
	count(func(n *Counters) { n.Dialed[InfoOf(c.Conn).Provider]++ })
	return c.Conn
}

// bound applies the dialer's own limits of time to ctx.
func (d *Dialer) bound(ctx context.Context) (context.Context, context.CancelFunc) {
	deadline := d.NetDialer.Deadline
	if d.NetDialer.Timeout != 0 { // negative means expired, as for net
		if t := time.Now().Add(d.NetDialer.Timeout); deadline.IsZero() || t.Before(deadline) {
			deadline = t
		}
	}
	if deadline.IsZero() {
		return ctx, func() {}
	}
	return context.WithDeadline(ctx, deadline)
}

// control returns the hook for sockets. Like net it gives ControlContext precedence.
func (d *Dialer) control() func(context.Context, string, string, syscall.RawConn) error {
	switch plain := d.NetDialer.Control; {
	case d.NetDialer.ControlContext != nil:
		return d.NetDialer.ControlContext
	case plain != nil:
		return func(_ context.Context, network, address string, c syscall.RawConn) error {
			return plain(network, address, c)
		}
	}
	return nil
}

// fallBack leaves the connection to net. attempted: a SAN was, in vain.
func (d *Dialer) fallBack(ctx context.Context, network, address string, why *Unavailable, attempted bool) (dialed, error) {
	if d.Policy == Require {
		return dialed{}, dialError(network, d.NetDialer.LocalAddr, netip.AddrPort{}, requireError{why})
	}
	c, err := d.netDialer(attempted).DialContext(ctx, network, address)
	return dialed{c, why}, err
}
