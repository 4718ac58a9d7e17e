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

	// Move moves a connection that this process has dialed: it connects to the process at the
	// other end, and proposes the move to it (Propose). The error is preferably a *session.Unavailable.
	// hello.ErrNotAccepted, hello.ErrUnknown and hello.ErrUndecided keep the connection from the
	// providers behind this one.
	Move(ctx context.Context, h newconn.Handle, s Settings) error

	// NeedsStamp reports whether Move may need the stamp of a connection that was dialed, which is
	// known only before that is used. It is part of each dial.
	NeedsStamp(tcp *net.TCPConn, s Settings) bool

	// Listen has the processes at other ends find this one for the connections that a TCP
	// listener accepts. It hands over each endpoint by which one may propose to move (Receive). The
	// error is preferably a *session.Unavailable.
	Listen(tcp *net.TCPListener, s Settings) (Acceptor, error)

	// Hold has them find this process for one connection that it has accepted, whoever listens,
	// until Close. It returns nil where only a listener is found.
	Hold(tcp *net.TCPConn, s Settings) (io.Closer, error)

	// Stamps reports whether connections may be told by their stamps, which TCP has to keep.
	Stamps(s Settings) bool
}

// Acceptor is a provider's part of a listener.
type Acceptor interface {
	// Lacks returns why it does not take connections now, nil: it does. all: it takes none, or else
	// none from other network namespaces.
	Lacks() (why error, all bool)

	io.Closer
}

// Came is an endpoint by which another process may propose to move a connection.
type Came struct {
	session.Endpoint
	Provider string
	User     *uint32 // whose the process is, if the kernel knows it; then it is of this network namespace
	outside  bool    // the process is to be of another network namespace of this host
}

// Choice is what connections may move to, and how.
type Choice struct {
	Providers []Provider           // in order of preference
	Without   *session.Unavailable // why there are none, or none is tried
	Settings  Settings
}

// Settings are what dialers and listeners hand down to providers.
type Settings struct {
	Session session.Config
	Attempt time.Duration // bounds an attempt to move
	V6Only  bool          // for Listen: take no IPv4
	Zone    string        // for Listen: the zone of the address that was given

	// Of shm:
	Namespace uint64 // of what was accepted, or its listener; 0: not known
	Dir       string // for other network namespaces of this host; "": none

	// Of verbs:
	RDMA         RDMA
	Subnets      []netip.Prefix // that it may serve; nil: all
	SharedDomain bool
}

// RDMA is san.RDMA.
type RDMA struct {
	IWARPOffset                            int
	WithoutCM                              bool
	TrafficClass, ServiceLevel, AckTimeout uint8
}

// Names are all that programs and operators may name, in order of preference: also the providers
// that this build does not have.
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
