package san

import (
	"context"
	"io"
	"net"
	"net/netip"
	"slices"
	"syscall"
	"time"

	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/session"
)

// provider is what the switch needs to know of a SAN service provider.
type provider interface {
	name() string

	// serves returns nil if a destination is worth an attempt (C3), and otherwise why
	// it is not. It does not block.
	serves(dst netip.Addr, s settings) error

	// listen adds a SAN listener beside tcp, on the same address (C2). An error,
	// preferably an *Unavailable, means that this listener does without this SAN.
	listen(tcp *net.TCPListener, s settings) (acceptor, error)

	// dial connects within ctx. It returns ECONNREFUSED or EHOSTUNREACH only if TCP
	// is guaranteed to fail as well (C4), otherwise preferably an *Unavailable.
	dial(ctx context.Context, r request) (transport, error)
}

// settings are what dialers and listeners hand down to providers.
type settings struct {
	session session.Config
	local   bool          // Options.LocalAddresses
	attempt time.Duration // bounds an attempt to connect
	backlog int           // connections that wait for accept
	v6only  bool          // for listen: take no IPv4
	zone    string        // for listen: the zone of the address that was asked for

	// Of verbs:
	rdma         RDMA
	subnets      []netip.Prefix // that it may serve; nil: all
	sharedDomain bool
}

// settle returns the settings for a dialer's or listener's options.
func settle(o sanconn.Options, rdma RDMA, policy Policy, env environment, backlog int) settings {
	s := settings{
		session:      o.Session(),
		local:        o.LocalAddresses,
		attempt:      o.AttemptTimeout,
		backlog:      backlog,
		rdma:         rdma,
		subnets:      env.subnets,
		sharedDomain: env.sharedDomain,
	}
	if s.rdma.IWARPOffset == 0 {
		s.rdma.IWARPOffset = env.rdma.IWARPOffset
	}
	s.rdma.WithoutCM = s.rdma.WithoutCM || env.rdma.WithoutCM
	switch {
	case s.attempt > 0:
	case policy == Require:
		s.attempt = requireAttemptTimeout
	default:
		s.attempt = defaultAttemptTimeout
	}
	s.session.Disable |= env.disable
	return s
}

// acceptor is a provider's listener.
type acceptor interface {
	// accept blocks until somebody connects. net.ErrClosed is final; after other
	// errors it is called again.
	accept() (transport, error)
	io.Closer
}

// request is one address to connect to.
type request struct {
	address string     // for NetDialer
	serving []provider // those that serve the address, in order
	network string     // tcp4 or tcp6
	remote  netip.AddrPort
	local   *net.TCPAddr // nil: the system's choice
	control func(ctx context.Context, network, address string, c syscall.RawConn) error
	settings

	tcpTimeout time.Duration // bounds the attempt by TCP; 0: it has no bound of its own
}

// transport is a connected endpoint with its addresses, on which no session has begun.
type transport struct {
	endpoint      session.Endpoint
	local, remote *net.TCPAddr
	hold          io.Closer // closed after the endpoint; may be nil
}

// release closes what the transport holds besides its endpoint.
func (t transport) release() {
	if t.hold != nil {
		t.hold.Close()
	}
}

// standard are the providers of the project, in order of preference, even those that this
// build does not have.
var standard = []string{"shm", "verbs"}

// providerNames are all that Providers and SAN_PROVIDERS may name, in order of
// preference.
func providerNames(registered []provider) []string {
	names := slices.Clone(standard)
	for _, p := range registered {
		if !slices.Contains(names, p.name()) {
			names = append(names, p.name())
		}
	}
	return names
}

func isProvider(name string, registered []provider) bool {
	return slices.Contains(providerNames(registered), name)
}
