// Package tcpid has what the kernel keeps of a TCP connection that both its ends can
// compare, so that each end of a connection over a SAN can check that the other end of it is
// the other end of that TCP connection. It opens no TCP connection, and moves no bytes.
//
// On one host, Peer gets from the kernel the socket at the other end; its cookie is unique.
// Between hosts, or network namespaces, both ends have the timestamp of the SYN: see Stamp.
package tcpid

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
)

// ErrNotHere: this host and network namespace have no socket that is the connection's other
// end. There is another host or namespace, or a proxy or address translation in between.
var ErrNotHere = errors.New("tcpid: the other end is not in this network namespace")

// errNoStamp: the connection has no timestamp that its two ends alone have. What is
// wrapped with it is the cause.
var errNoStamp = errors.New("tcpid: no timestamp to tell the connection by")

// ErrNotConnected: the connection is over, as behind a reset, and the kernel counts no more.
var ErrNotConnected = errors.New("tcpid: not connected")

// ErrMPTCP: a Multipath TCP socket is not the TCP connection: it has several, or none.
var ErrMPTCP = errors.New("tcpid: a Multipath TCP socket")

// Ends are a connection's addresses as one end sees them. They have neither zones, which
// number the interfaces of one host, nor IPv4 in 16 bytes. So what one end sees equals what
// the other sees, reversed, unless addresses are translated in between.
type Ends struct{ Local, Remote netip.AddrPort }

// Reversed returns the addresses as the other end sees them.
func (e Ends) Reversed() Ends { return Ends{Local: e.Remote, Remote: e.Local} }

// EndsOf returns a connection's addresses, also of one that has been closed.
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

// Socket is what the kernel shows of a socket to all users.
type Socket struct {
	// Cookie is what Cookie returns to those that have the socket.
	Cookie uint64

	// UID is the user that made the socket, or accepted it: not the listener's,
	// and not whom the process has become since. It is 65534 for all users that have no
	// number in this user namespace.
	UID uint32

	// Accepted: a process has it. Not so while it waits in a backlog, where UID means
	// nothing yet, and after it was closed.
	Accepted bool
}
