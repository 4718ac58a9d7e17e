package san

import (
	"context"
	"io"
	"net"

	"github.com/sanconn/san/internal/newconn"
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

	// needsStamp reports whether move may need the stamp of a connection that was dialed, which is
	// known only before that is used. It is part of each dial.
	needsStamp(tcp *net.TCPConn, s settings) bool

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
