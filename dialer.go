package san

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/session"
)

const (
	// defaultAttemptTimeout bounds an attempt over a SAN: many times longer than an
	// attempt that is answered, and a delay that a user tolerates once.
	defaultAttemptTimeout = 500 * time.Millisecond

	// requireAttemptTimeout is the bound if there is nothing to fall back to. Then
	// an attempt must not fail only because processors are busy.
	requireAttemptTimeout = 10 * time.Second
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
	// KeepAlive and KeepAliveConfig apply to TCP alone: for a SAN there is
	// Options.KeepAlive.
	NetDialer net.Dialer

	// Policy says what to do where there is no SAN. The default is Prefer.
	Policy Policy

	// Providers are the providers to try, in order of preference: "shm", "verbs".
	// Nil means all that this build and this host have, in the order of
	// SAN_PROVIDERS if that is set; empty means none. SAN_PROVIDERS restricts them
	// in any case. With an unknown name each dial fails.
	Providers []string

	// Options tune connections over a SAN.
	Options sanconn.Options

	// RDMA says how connections over RDMA are made.
	RDMA RDMA
}

// Dial connects to the address; see DialContext.
func (d *Dialer) Dial(network, address string) (net.Conn, error) {
	return d.DialContext(context.Background(), network, address)
}

// DialContext connects to the address as net.Dialer.DialContext does, and takes
// the same networks and addresses. Over a SAN the connection is a *sanconn.Conn.
// Without one it is what NetDialer returns; InfoOf tells the reason, and Stats counts
// it. If the policy is Require, the reason is the error: errors.As finds an
// *Unavailable in it. All errors are *net.OpError, as net's are.
//
// If a SAN serves any of a host's addresses, they are tried in turn, each over the SANs
// that serve it and then by TCP, and they share the time until the deadline by net's rule.
// The two address families are then not tried in parallel: before the other family has its
// turn, each address of the first takes up to Options.AttemptTimeout for each SAN and 5 s
// for TCP (no bound if NetDialer's FallbackDelay is negative). If no SAN serves any of them,
// NetDialer gets the name, and connects as it always does (RFC 8305, "Happy Eyeballs"); it
// looks up the name again if that has addresses of both families.
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
		return d.fallBack(ctx, network, address, notTCP(network))
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
		return d.fallBack(ctx, network, address, why)
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
		return d.fallBack(ctx, network, address, &Unavailable{Reason: ReasonNotServed})
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

// plan returns the addresses to connect to, in net's order: those of LocalAddr's family,
// or all if there are none, to get net's own error.
func (d *Dialer) plan(ctx context.Context, network, address string, providers []provider, env environment) ([]request, error) {
	local, err := dialLocal(d.NetDialer.LocalAddr)
	if err != nil {
		return nil, dialError(network, d.NetDialer.LocalAddr, netip.AddrPort{}, err)
	}
	dsts, named, err := resolve(ctx, d.NetDialer.Resolver, network, address, local)
	if err != nil {
		return nil, dialError(network, nil, netip.AddrPort{}, err)
	}
	var requests []request
	for _, dst := range dsts {
		r := request{
			address:  address,
			network:  familyOf(dst.Addr()),
			remote:   dst,
			local:    local,
			control:  d.control(),
			settings: settle(d.Options, d.RDMA, d.Policy, env, 0),
		}
		if named {
			r.address = dst.String() // so that net does not look the name up again
		}
		for _, p := range providers {
			if sameFamily(local, dst.Addr()) && p.serves(dst.Addr(), r.settings) == nil {
				r.serving = append(r.serving, p)
			}
		}
		requests = append(requests, r)
	}
	reached := func(r request) bool { return sameFamily(local, r.remote.Addr()) }
	if slices.ContainsFunc(requests, reached) {
		requests = slices.DeleteFunc(requests, func(r request) bool { return !reached(r) })
	}
	return requests, nil
}

// served reports whether a provider serves the address.
func served(r request) bool { return len(r.serving) > 0 }

// severalFamilies reports whether there are addresses of both families, which net tries in
// parallel.
func severalFamilies(requests []request) bool {
	return slices.ContainsFunc(requests, func(r request) bool { return r.network != requests[0].network })
}

// notServed returns why none of the providers serves a destination.
func notServed(r request, providers []provider) *Unavailable {
	var words []string
	for _, p := range providers {
		if err := p.serves(r.remote.Addr(), r.settings); err != nil {
			words = append(words, err.Error())
		}
	}
	if words == nil {
		return &Unavailable{Reason: ReasonNotServed}
	}
	return &Unavailable{Reason: ReasonNotServed, Err: errors.New(strings.Join(words, "; "))}
}

// bound applies the dialer's own limits of time to ctx.
func (d *Dialer) bound(ctx context.Context) (context.Context, context.CancelFunc) {
	deadline := d.NetDialer.Deadline
	if d.NetDialer.Timeout != 0 { // negative means expired, as for net
		if t := time.Now().Add(d.NetDialer.Timeout); deadline.IsZero() || t.Before(deadline) {
			deadline = t
		}
	}
	var cancel context.CancelFunc
	if deadline.IsZero() {
		ctx, cancel = context.WithCancel(ctx)
	} else {
		ctx, cancel = context.WithDeadline(ctx, deadline)
	}
	//lint:ignore SA1019 it is deprecated, but net looks at it
	if cancelled := d.NetDialer.Cancel; cancelled != nil {
		go func() {
			select {
			case <-cancelled:
				cancel()
			case <-ctx.Done(): // when DialContext returns, at the latest
			}
		}()
	}
	return ctx, cancel
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

// fallBack leaves the connection to net.
func (d *Dialer) fallBack(ctx context.Context, network, address string, why *Unavailable) (dialed, error) {
	if d.Policy == Require {
		return dialed{}, dialError(network, d.NetDialer.LocalAddr, netip.AddrPort{}, requireError{why})
	}
	c, err := d.NetDialer.DialContext(ctx, network, address)
	return dialed{c, why}, err
}

// familyTimeout bounds TCP's attempt at an address while the other family waits for its
// turn, where net would not let it wait. By then Linux has sent three SYNs (after 0, 1 and
// 3 s): the family is taken to be unreachable.
const familyTimeout = 5 * time.Second

// dialEach tries the addresses in turn until one connects.
func (d *Dialer) dialEach(ctx context.Context, network string, requests []request) (dialed, error) {
	var first error
	for i, r := range requests {
		ctx, cancel := share(ctx, len(requests)-i)
		if d.NetDialer.FallbackDelay >= 0 && severalFamilies(requests[i:]) {
			r.tcpTimeout = familyTimeout
		}
		c, err := d.dialOne(ctx, network, r)
		cancel()
		if err == nil {
			return c, nil
		}
		first = cmp.Or(first, err)
	}
	return dialed{}, first
}

// dialOne connects to one address: by each provider that serves it in turn,
// then by TCP.
func (d *Dialer) dialOne(ctx context.Context, network string, r request) (dialed, error) {
	why := &Unavailable{Reason: ReasonNotServed}
	for i, p := range r.serving {
		c, err := d.dialSAN(ctx, p, r)
		if err == nil {
			return dialed{Conn: c}, nil
		}
		unavailable, final := verdict(ctx, err)
		if final != nil {
			return dialed{}, dialError(network, d.NetDialer.LocalAddr, r.remote, final)
		}
		if i == 0 { // report what the preferred provider says
			why = unavailable
		}
	}
	if d.Policy == Require {
		return dialed{}, dialError(network, d.NetDialer.LocalAddr, r.remote, requireError{why})
	}
	if r.tcpTimeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, r.tcpTimeout)
		defer cancel()
	}
	return d.fallBack(ctx, network, r.address, why)
}

// dialSAN makes one attempt over a SAN, unless the destination did not answer recently.
func (d *Dialer) dialSAN(ctx context.Context, p provider, r request) (net.Conn, error) {
	if ctx.Err() != nil {
		return nil, ctx.Err() // before any hook is called
	}
	key := keyOf(p, r)
	if d.Policy != Require {
		if left := dialBackoff.left(key, time.Now()); left > 0 {
			return nil, &Unavailable{Reason: ReasonRemembered,
				Err: fmt.Errorf("%s: %v did not answer lately, and is asked again in %v", p.name(), r.remote, left.Round(time.Millisecond))}
		}
	}
	patience := r.attempt
	if deadline, ok := ctx.Deadline(); ok && d.Policy != Require {
		patience = min(patience, time.Until(deadline)/2) // leave TCP its time
	}
	attempt, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	t, err := p.dial(attempt, r)
	if err == nil {
		var s *session.Session
		if s, err = negotiate(attempt, t, r.session); err == nil {
			dialBackoff.answered(key)
			return newConn(p.name(), s, t), nil
		}
	}
	// Only silence is remembered: answers cost no time. If the dialer's own time is up or
	// the attempt was very short, it proves nothing; if it was shortened, not much.
	switch {
	case ctx.Err() != nil:
	case answered(err):
		dialBackoff.answered(key)
	case reasonOf(err) == ReasonTimeout && patience >= minSilence:
		dialBackoff.timedOut(key, time.Now(), patience == r.attempt)
	}
	return nil, err
}

// negotiate starts the session. If it fails it releases the transport.
func negotiate(ctx context.Context, t transport, config session.Config) (*session.Session, error) {
	s := session.New(t.endpoint, config)
	err := s.Negotiate(ctx)
	if err == nil {
		return s, nil
	}
	if ctx.Err() != nil {
		s.Close() // not a reset: a listener that is being closed refuses nobody
	}
	s.Abort()
	t.release()
	if !t.endpoint.Limits().Buffered || errors.As(err, new(*Unavailable)) {
		return nil, err
	}
	// There is no wire that could have failed, so the listener has ended the connection.
	switch {
	case errors.Is(err, syscall.ECONNRESET):
		return nil, syscall.ECONNREFUSED // a full backlog (C7, C8)
	case errors.Is(err, syscall.EPIPE), errors.Is(err, io.EOF):
		// The listener is being closed, or was handed to another process. If nobody
		// listens any more, TCP will tell.
		return nil, &Unavailable{Reason: ReasonNoListener, Err: err}
	}
	return nil, err
}

// newConn makes a connection for the application of a negotiated session.
func newConn(provider string, s *session.Session, t transport) *sanconn.Conn {
	count(func(n *Counters) { n.Open[provider]++ })
	return sanconn.New(s, t.local, t.remote, func() {
		t.release()
		count(func(n *Counters) { n.Open[provider]-- })
	})
}
