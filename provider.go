package san

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sanconn/san/internal/environment"
	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/session"
)

// provider is what the switch needs to know of a SAN service provider.
type provider interface {
	name() string

	// move moves a connection that this process has dialed: it connects to the process at the
	// other end, and offers it to move (offer). The error is preferably an *Unavailable.
	// hello.ErrNotAccepted, hello.ErrUnknown and hello.ErrUndecided keep the connection from the providers behind
	// this one.
	move(ctx context.Context, h newconn.Handle, s settings) error

	// dialed notes what is known of a connection only before it is used. It is part of each dial.
	dialed(tcp *net.TCPConn, began time.Time, l *life, s settings)

	// listen has the processes at other ends find this one for the connections that a TCP
	// listener accepts. It hands over each endpoint by which one may offer to move. The error is
	// preferably an *Unavailable.
	listen(tcp *net.TCPListener, s settings) (acceptor, error)

	// hold has them find this process for one connection that it has accepted, whoever listens,
	// until Close. It returns nil where only a listener is found.
	hold(tcp *net.TCPConn, s settings) (io.Closer, error)

	// stamps reports whether connections may be told by their stamps, which TCP has to keep.
	stamps(s settings) bool
}

// acceptor is a provider's part of a listener.
type acceptor interface {
	// Lacks returns why it does not take connections now, nil: it does. all: it takes none, or else
	// none from other network namespaces.
	Lacks() (why error, all bool)

	io.Closer
}

// came is an endpoint by which another process may offer to move a connection.
type came struct {
	session.Endpoint
	provider string
	user     *uint32 // whose the process is, if the kernel knows it; then it is of this network namespace
	outside  bool    // the process is to be of another network namespace of this host
}

// processEnvironment reads the environment once, because the answer must not change between
// connections.
var processEnvironment = sync.OnceValue(func() *environment.Values { return environment.Read(providerNames()) })

// choose returns the providers to try, in order, or why there are none. want is a Providers
// field. It is an error if that has an unknown name, or the environment is not understood.
func choose(policy Policy, want []string, env *environment.Values) ([]provider, *Unavailable, error) {
	known := providerNames()
	if env.Err != nil {
		return nil, nil, env.Err
	}
	for _, name := range want {
		if !slices.Contains(known, name) {
			return nil, nil, fmt.Errorf("san: unknown provider %q in Providers; known are %s", name, strings.Join(known, ", "))
		}
	}
	switch {
	case want == nil && env.Restricted:
		want = env.Providers
	case want == nil:
		want = known
	}
	var chosen []provider
	disabled := len(want) == 0
	for _, name := range want {
		i := slices.IndexFunc(registry, func(p provider) bool { return p.name() == name })
		switch {
		case !env.Allows(name):
			disabled = true
		case i >= 0 && !slices.Contains(chosen, registry[i]):
			chosen = append(chosen, registry[i])
		}
	}
	switch {
	case policy == Never:
		return nil, &Unavailable{Reason: ReasonPolicy}, nil
	case len(chosen) > 0:
		return chosen, nil, nil
	case disabled:
		return nil, &Unavailable{Reason: ReasonDisabled}, nil
	}
	return nil, &Unavailable{Reason: ReasonNoProvider}, nil
}

// standard are the providers of the project, in order of preference, even those that this
// build does not have.
var standard = []string{"shm", "verbs"}

// providerNames are all that Providers and SAN_PROVIDERS may name, in order of preference.
func providerNames() (names []string) {
	for _, p := range registry {
		names = append(names, p.name())
	}
	for _, name := range standard {
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names
}

// settings are what dialers and listeners hand down to providers.
type settings struct {
	session session.Config
	attempt time.Duration // bounds an attempt to move
	v6only  bool          // for listen: take no IPv4
	zone    string        // for listen: the zone of the address that was given

	// Of shm:
	dir string // for other network namespaces of this host; "": none

	// Of verbs:
	rdma         RDMA
	subnets      []netip.Prefix // that it may serve; nil: all
	sharedDomain bool
}

// settle returns the settings for a dialer's or listener's options.
func settle(o sanconn.Options, rdma RDMA, policy Policy, dir string, env *environment.Values) settings {
	s := settings{
		session: session.Config{
			Threshold:     o.Threshold,
			ReceiveBudget: o.ReceiveBudget,
			SendBudget:    o.SendBudget,
			Spin:          o.Spin,
			KeepAlive:     o.KeepAlive,
			CancelTimeout: o.CancelTimeout,
			CloseTimeout:  o.CloseTimeout,
			Disable:       o.Disable | env.Disable,
			Trace:         env.Trace,
		},
		attempt:      o.AttemptTimeout,
		dir:          cmp.Or(dir, env.ShmDir),
		rdma:         rdma,
		subnets:      env.Subnets,
		sharedDomain: env.SharedDomain,
	}
	s.rdma.IWARPOffset = cmp.Or(s.rdma.IWARPOffset, env.IWARPOffset)
	s.rdma.WithoutCM = s.rdma.WithoutCM || env.WithoutCM
	s.rdma.TrafficClass = cmp.Or(s.rdma.TrafficClass, env.TrafficClass)
	s.rdma.ServiceLevel = cmp.Or(s.rdma.ServiceLevel, env.ServiceLevel)
	s.rdma.AckTimeout = cmp.Or(s.rdma.AckTimeout, env.AckTimeout)
	switch {
	case s.attempt > 0:
	case policy == Require:
		s.attempt = requireTimeout
	default:
		s.attempt = moveTimeout
	}
	return s
}
