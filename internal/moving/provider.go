package moving

import (
	"context"
	"io"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/session"
)

// Provider is what the switch needs to know of a SAN service provider.
type Provider interface {
	Name() string

	// Move moves a connection that this process has dialed: it connects to the process at the other
	// end, and proposes the move to it (Propose). The error should be a *session.Unavailable. After
	// hello.ErrNotAccepted, hello.ErrUnknown and hello.ErrUndecided the following providers are not
	// tried.
	Move(ctx context.Context, h newconn.Handle, s Settings) error

	// NeedsStamp reports whether Move may need the stamp of a dialed connection, which can be read only
	// before the connection is used. It is called in each dial.
	NeedsStamp(tcp *net.TCPConn, s Settings) bool

	// Listen lets the dialers of a TCP listener's connections find this process. It calls Receive with
	// each endpoint by which a process may propose to move one. The error should be a
	// *session.Unavailable.
	Listen(tcp *net.TCPListener, s Settings) (Acceptor, error)

	// Hold lets the dialer of one accepted connection find this process until Close, whichever process
	// listens. It returns nil if only listeners can be found.
	Hold(tcp *net.TCPConn, s Settings) (io.Closer, error)

	// Stamps reports whether dialers may prove their connections by stamps, for which TCP has to save
	// SYNs.
	Stamps(s Settings) bool
}

// Acceptor is a provider's part of a listener.
type Acceptor interface {
	// Lacks returns why no connections are taken now, or nil. all: none is taken; otherwise those of
	// this network namespace are.
	Lacks() (why error, all bool)

	io.Closer
}

// Came is an endpoint by which another process may propose to move a connection.
type Came struct {
	session.Endpoint
	Provider string
	User     *uint32 // the process's user, if the kernel tells; then the process is in this network namespace
	outside  bool    // the process has to be in another network namespace of this host
}

// Choice is what connections may move to, and how.
type Choice struct {
	Providers []Provider           // in order of preference
	Without   *session.Unavailable // why there are none, or why none is tried
	Settings  Settings
}

// Settings are what dialers and listeners pass to providers.
type Settings struct {
	Session session.Config
	Attempt time.Duration // bounds an attempt to move
	V6Only  bool          // for Listen: no IPv4
	Zone    string        // for Listen: the zone of the address

	// Of shm:
	Namespace uint64 // the network namespace of an accepted connection or a listener; 0: not known
	Dir       string // for other network namespaces of this host; "": none

	// Of verbs:
	RDMA         RDMA
	Subnets      []netip.Prefix // the peers that may be served; nil: all
	SharedDomain bool
}

// RDMA is the type behind san.RDMA.
type RDMA struct {
	IWARPOffset                            int
	WithoutCM                              bool
	TrafficClass, ServiceLevel, AckTimeout uint8
}

// Names returns the providers that programs and operators may name, in order of preference, including
// those that this build does not have.
func Names() (names []string) {
	for _, p := range Registry {
		names = append(names, p.Name())
	}
	for _, name := range []string{"shm", "verbs"} {
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names
}
