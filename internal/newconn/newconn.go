// Package newconn has the constructor of connections, which package san calls and no
// program has a use for: so package sanconn does not export it.
package newconn

import (
	"net"

	"github.com/sanconn/san/session"
)

// New makes a *sanconn.Conn of a negotiated session, which it owns from now on. onClose,
// if not nil, is called once, after the session was closed. It must not refer to the
// connection, which would never be collected then.
//
// Package sanconn sets it when it is initialized; it cannot be named here as a type, since
// it imports this package.
var New func(s *session.Session, local, remote *net.TCPAddr, onClose func()) net.Conn
