package san

import (
	"context"
	"io"
	"net"
	"time"

	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/session"
)

// provider is what the switch needs to know of a SAN service provider.
type provider interface {
	name() string

	// move moves a connection that this process has dialed: it connects to the process at the
	// other end, and offers it to move (offer). The error is preferably an *Unavailable.
	// errNotAccepted, errUnknown and errUndecided keep the connection from the providers behind
	// this one.
	move(ctx context.Context, h newconn.Handle, s settings) error

	// dialed notes what is known of a connection only before it is used. It is part of each dial.
	dialed(tcp *net.TCPConn, began time.Time, l *life, s settings)

	// listen has the processes at other ends find this one for the connections that a TCP
	// listener accepts. It hands over each endpoint by which one may offer to move. An error,
	// preferably an *Unavailable, is what this listener does without: this SAN, if there is no
	// acceptor beside it, or else connections from other network namespaces.
	listen(tcp *net.TCPListener, s settings) (acceptor, error)

	// hold has them find this process for one connection that it has accepted, whoever listens,
	// until release. That is nil where only a listener is found.
	hold(tcp *net.TCPConn, s settings) (release func(), err error)

	// stamps reports whether connections may be told by their stamps, which TCP has to keep.
	stamps(s settings) bool
}

// acceptor is a provider's part of a listener.
type acceptor interface {
	// Waiting returns why nobody is found yet, because another process has to end its own
	// first; otherwise nil.
	Waiting() error

	io.Closer
}

// came is an endpoint by which another process may offer to move a connection.
type came struct {
	session.Endpoint
	provider string
	user     *uint32 // whose the process is, if the kernel knows it; then it is of this network namespace
	outside  bool    // the process is to be of another network namespace of this host
}
