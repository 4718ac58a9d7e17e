package shm

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"
)

// hostAddr reports whether an interface of this host has the address.
func hostAddr(a netip.Addr) bool {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return false
	}
	for _, x := range addrs {
		if n, ok := x.(*net.IPNet); ok {
			if ip, ok := netip.AddrFromSlice(n.IP); ok && ip.Unmap() == a {
				return true
			}
		}
	}
	return false
}

// ServedBy returns why connections to an address do not go through shared memory, or
// nil if they may.
func ServedBy(a netip.Addr, c Config) error {
	switch {
	case a.IsLoopback():
		return nil
	case !c.Local:
		return fmt.Errorf("shm: %v is not a loopback address, and LocalAddresses is off", a)
	case a.Zone() != "":
		return fmt.Errorf("shm: %v has a zone", a)
	case !a.IsValid() || a.IsUnspecified() || !hostAddr(a):
		return fmt.Errorf("shm: %v is not an address of this host", a)
	}
	return nil
}

func (c Config) served(a netip.Addr) bool { return ServedBy(a, c) == nil }

// boundAddr returns the address that a TCP socket is bound to, and fails for anything
// else: a peer that passes a socket cannot claim an address that it does not hold.
func boundAddr(fd int) (netip.AddrPort, error) {
	var none netip.AddrPort
	protocol, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PROTOCOL)
	if err != nil || protocol != unix.IPPROTO_TCP && protocol != unix.IPPROTO_MPTCP {
		return none, fmt.Errorf("shm: not a TCP socket (protocol %d): %w", protocol, errors.Join(err, unix.EINVAL))
	}
	return boundName(fd)
}

// boundName is boundAddr of what is known to be a TCP socket.
func boundName(fd int) (netip.AddrPort, error) {
	var none netip.AddrPort
	ap, err := sockname(fd)
	if err != nil {
		return none, fmt.Errorf("shm: %w", err)
	}
	if !ap.IsValid() || ap.Port() == 0 || ap.Addr().IsUnspecified() {
		return none, fmt.Errorf("shm: the socket is bound to %v, not to one address: %w", ap, unix.EINVAL)
	}
	return ap, nil
}

// unused reports whether a TCP socket was never connected or accepted. An accepted one
// has its server's address, which no client could connect from, perhaps a port below
// 1024. It keeps that after its connection has ended or was cut by connect(AF_UNSPEC),
// which resets counters but not what was negotiated (tcp_disconnect, net/ipv4/tcp.c).
func unused(fd int) bool {
	const tcpClose = 7 // include/net/tcp_states.h
	info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	return err == nil && info.State == tcpClose && info.Segs_in == 0 && info.Segs_out == 0 &&
		info.Pmtu == 0 && info.Advmss == 0 && info.Rcv_ssthresh == 0
}

// netns identifies the network namespace of a socket; 0 if the kernel does not tell
// (before Linux 5.14).
func netns(fd int) uint64 {
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err != nil {
		return 0
	}
	return cookie
}

// mayConnect reports why the system would forbid this process to connect the socket to a
// port: Landlock (LANDLOCK_ACCESS_NET_CONNECT_TCP) and SELinux (name_connect) do so. They
// are consulted before the address, with which no TCP socket can connect, so that nothing is
// sent, and the socket stays as it was.
func mayConnect(fd int, to netip.AddrPort) error {
	var nowhere unix.Sockaddr
	if to.Addr().Is4() {
		nowhere = &unix.SockaddrInet4{Addr: [4]byte{255, 255, 255, 255}, Port: int(to.Port())}
	} else {
		nowhere = &unix.SockaddrInet6{Addr: [16]byte{0xff, 0x02, 15: 1}, Port: int(to.Port())} // all nodes, on the link
	}
	err := unix.Connect(fd, nowhere)
	if errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM) {
		return fmt.Errorf("shm: connecting to port %d: %w", to.Port(), err)
	}
	return nil
}
