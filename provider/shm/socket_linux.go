package shm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/session"
)

// overflowUID stands for every user that a user namespace does not map
// (user_namespaces(7)). In a namespace that maps all users it is a user, "nobody".
const overflowUID = 65534

// oneUser reports whether uid stands for a single user.
func oneUser(uid uint32) bool { return uid != overflowUID || knowsAllUsers() }

// knowsAllUsers reports whether this user namespace maps all users. It asks once: a Go
// program cannot move to another user namespace, which takes a single thread.
var knowsAllUsers = sync.OnceValue(func() bool {
	ids, err := os.ReadFile("/proc/self/uid_map")
	return err == nil && slices.Equal(strings.Fields(string(ids)), []string{"0", "0", "4294967295"})
})

// rendezvous is the abstract unix address of a TCP listener, which is named by
// its inode (see diag_linux.go). Abstract addresses, like TCP's ports, belong to
// the network namespace.
func rendezvous(inode uint32) *net.UnixAddr {
	return &net.UnixAddr{Net: "unixpacket", Name: fmt.Sprintf("@san-shm/%d/%08x", version, inode)}
}

// peerCred returns the credentials of the process that made the other end of a unix
// socket; of a listener's, the one that called listen.
func peerCred(rc syscall.RawConn) (cred *unix.Ucred, err error) {
	if e := rc.Control(func(fd uintptr) {
		cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); e != nil {
		return nil, e
	}
	return cred, err
}

// peerPidfd returns a pidfd of the peer's process, for the runtime's poller, or nil.
func peerPidfd(rc syscall.RawConn, pid int) *os.File {
	fd := -1
	rc.Control(func(s uintptr) {
		var err error
		// Linux 6.5. The only way for a process that is not visible here.
		if fd, err = unix.GetsockoptInt(int(s), unix.SOL_SOCKET, unix.SO_PEERPIDFD); err != nil {
			fd = -1
		}
	})
	if fd < 0 && pid > 0 {
		var err error
		if fd, err = unix.PidfdOpen(pid, 0); err != nil { // Linux 5.3
			fd = -1
		}
	}
	if fd < 0 {
		return nil
	}
	unix.CloseOnExec(fd)
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return nil
	}
	return os.NewFile(uintptr(fd), "pidfd")
}

// boundAddr returns the address that a TCP socket is bound to, and fails for anything
// else: a peer that passes a socket cannot claim an address that it does not hold.
func boundAddr(fd int) (netip.AddrPort, error) {
	var none netip.AddrPort
	protocol, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PROTOCOL)
	if err != nil || protocol != unix.IPPROTO_TCP && protocol != unix.IPPROTO_MPTCP {
		return none, fmt.Errorf("shm: not a TCP socket (protocol %d): %w", protocol, errors.Join(err, unix.EINVAL))
	}
	sa, err := unix.Getsockname(fd)
	if err != nil {
		return none, fmt.Errorf("shm: getsockname: %w", err)
	}
	var ap netip.AddrPort
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		ap = netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port))
	case *unix.SockaddrInet6:
		ap = netip.AddrPortFrom(netip.AddrFrom16(sa.Addr).Unmap(), uint16(sa.Port))
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

// unavailable gives an error its reason.
func unavailable(err error) error {
	var known *session.Unavailable
	if errors.As(err, &known) {
		return err
	}
	reason := session.ReasonProtocol
	for _, r := range []struct {
		err    error
		reason session.Reason
	}{
		{errSegment, session.ReasonProtocol},
		{context.DeadlineExceeded, session.ReasonTimeout},
		{context.Canceled, session.ReasonTimeout},
		{os.ErrDeadlineExceeded, session.ReasonTimeout},
		{unix.EAGAIN, session.ReasonTimeout}, // the listener's queue of links is full
		{unix.ECONNREFUSED, session.ReasonNoListener},
		{unix.EMFILE, session.ReasonResources},
		{unix.ENFILE, session.ReasonResources},
		{unix.ENOMEM, session.ReasonResources},
		{unix.ENOBUFS, session.ReasonResources},
		{unix.ETOOMANYREFS, session.ReasonResources},
		{unix.EACCES, session.ReasonPermission},
		{unix.EPERM, session.ReasonPermission},
		{errLinkGone, session.ReasonNoListener},
		{io.EOF, session.ReasonNoListener}, // the listener went away meanwhile
		{unix.ECONNRESET, session.ReasonNoListener},
		{unix.EPIPE, session.ReasonNoListener},
	} {
		if errors.Is(err, r.err) {
			reason = r.reason
			break
		}
	}
	return &session.Unavailable{Reason: reason, Err: err}
}

// codeError returns the error for a code from the peer, as Dial returns it.
func codeError(code uint8) error {
	switch code {
	case codeVersion:
		return &session.Unavailable{Reason: session.ReasonVersion, Err: fmt.Errorf("shm: the listener's process does not speak version %d", version)}
	case codeRefused:
		return fmt.Errorf("shm: the listener's backlog is full: %w", syscall.ECONNREFUSED)
	case codeClosed:
		return &session.Unavailable{Reason: session.ReasonNoListener, Err: errors.New("shm: the listener is closed")}
	case codeResources:
		return &session.Unavailable{Reason: session.ReasonResources, Err: errors.New("shm: the listener's process has no room")}
	}
	return &session.Unavailable{Reason: session.ReasonProtocol, Err: fmt.Errorf("shm: the listener answered %d", code)}
}
