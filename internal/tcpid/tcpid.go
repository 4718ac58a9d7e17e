// Package tcpid gets from the kernel what both ends of a TCP connection can compare. By that, each end
// of a session checks that its peer holds the other end of the same TCP connection. The package opens
// no TCP connection, and moves no bytes.
//
// On one host, Peer returns the socket at the other end, whose cookie is unique. Between hosts, or
// network namespaces, both ends know the timestamp of the SYN: see Stamp.
package tcpid

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
)

// ErrNotHere: no socket in this network namespace is the connection's other end. That end is on another
// host or in another namespace, or there is a proxy or address translation in between.
var ErrNotHere = errors.New("tcpid: the other end is not in this network namespace")

// errNoStamp: the connection has no timestamp that only its two ends know. Errors that wrap it tell the
// cause.
var errNoStamp = errors.New("tcpid: no timestamp to tell the connection by")

// ErrNotConnected: the connection is over, as after a reset, and the kernel does not count its bytes.
var ErrNotConnected = errors.New("tcpid: not connected")

// ErrMPTCP: a Multipath TCP socket has several TCP connections, or none.
var ErrMPTCP = errors.New("tcpid: a Multipath TCP socket")

// Ends are a connection's addresses as one end sees them, without zones, which are numbers of one host,
// and with IPv4 addresses in 4 bytes. So Ends equals the Reversed Ends of the other end, unless
// addresses are translated in between.
type Ends struct{ Local, Remote netip.AddrPort }

// Reversed returns the addresses as the other end sees them.
func (e Ends) Reversed() Ends { return Ends{Local: e.Remote, Remote: e.Local} }

// EndsOf returns a connection's addresses, even after the connection was closed.
func EndsOf(c *net.TCPConn) (Ends, error) {
	local, _ := c.LocalAddr().(*net.TCPAddr)
	remote, _ := c.RemoteAddr().(*net.TCPAddr)
	e := Ends{Local: plain(local.AddrPort()), Remote: plain(remote.AddrPort())}
	if !e.Local.IsValid() || !e.Remote.IsValid() {
		return Ends{}, fmt.Errorf("tcpid: not connected: %v to %v", local, remote)
	}
	return e, nil
}

func plain(a netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(a.Addr().Unmap().WithZone(""), a.Port())
}

// Socket is what the kernel shows of a socket to every user.
type Socket struct {
	// Cookie is the number that the function Cookie returns to a process that has the socket.
	Cookie uint64

	// UID is the user that made or accepted the socket: not the user that made the listener, and not
	// the user that the process has become since. It is 65534 for a user that has no number in this
	// user namespace.
	UID uint32

	// Accepted reports whether a process has the socket. It is false for a connection in a backlog,
	// whose UID means nothing yet, and after the socket was closed.
	Accepted bool
}
