package shm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/session"
)

// Which TCP listener would a connect reach? The kernel's socket diagnosis
// (include/uapi/linux/inet_diag.h) answers with the very function that looks up a
// SYN, so wildcards, dual-stack sockets, SO_REUSEPORT and bound devices need no
// special treatment. It needs no privilege.
//
// The listener is named by its inode, which its own process gets from fstat. The
// socket cookie would be unique for ever, but an MPTCP listener, which is what
// package net makes, has one cookie in its process and another for the TCP
// socket below, which a SYN finds; both share the inode. Inode numbers come from a
// 32-bit counter. If one is reused, the listener sees that the dialed address is not
// its own.

const (
	diagRequestSize = unix.SizeofNlMsghdr + 56 // inet_diag_req_v2
	diagReplySize   = unix.SizeofNlMsghdr + 72 // inet_diag_msg

	tcpListen     = 10 // TCP_LISTEN
	loopbackIndex = 1  // of the lo device in every network namespace
	diagInfo      = 2  // INET_DIAG_INFO
	diagMD5       = 18 // INET_DIAG_MD5SIG
)

// errNotFound: there is no TCP listener, so a connect would be refused.
var errNotFound = errors.New("shm: no TCP listener")

// owner is a TCP listener: its inode and its user.
type owner struct {
	inode uint32
	uid   uint32

	// signed: it takes segments with a signature (TCP_MD5SIG) from some. The kernel tells
	// that to those who have CAP_NET_ADMIN.
	signed bool
}

// diagnose asks once, in this thread's network namespace.
func diagnose(from, to netip.AddrPort) (owner, error) {
	d, err := newDiagSocket()
	if err != nil {
		return owner{}, err
	}
	defer d.close()
	return d.find(from, to)
}

// diagSocket asks about the network namespace in which it was made. It may be used
// concurrently.
type diagSocket struct {
	mu  sync.Mutex // guards what follows; nothing under it blocks: the kernel answers before sendto returns
	fd  int        // -1: closed
	seq uint32
}

func newDiagSocket() (*diagSocket, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return nil, fmt.Errorf("shm: sock_diag: %w", err)
	}
	return &diagSocket{fd: fd}, nil
}

func (d *diagSocket) close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.fd >= 0 {
		unix.Close(d.fd)
	}
	d.fd = -1
}

func (d *diagSocket) find(from, to netip.AddrPort) (o owner, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.fd < 0 {
		return o, net.ErrClosed
	}
	d.seq++
	if err := unix.Sendto(d.fd, diagRequest(from, to, d.seq), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return o, fmt.Errorf("shm: sock_diag: %w", err)
	}
	var reply [2048]byte
	for {
		n, _, err := unix.Recvfrom(d.fd, reply[:], unix.MSG_DONTWAIT)
		if err != nil {
			return o, fmt.Errorf("shm: sock_diag: %w", err)
		}
		if n >= unix.SizeofNlMsghdr && binary.NativeEndian.Uint32(reply[8:]) == d.seq {
			return parseDiagReply(reply[:n])
		}
	}
}

func diagRequest(from, to netip.AddrPort, seq uint32) []byte {
	b := make([]byte, diagRequestSize)
	ne := binary.NativeEndian
	ne.PutUint32(b[0:], diagRequestSize)
	ne.PutUint16(b[4:], unix.SOCK_DIAG_BY_FAMILY)
	ne.PutUint16(b[6:], unix.NLM_F_REQUEST)
	ne.PutUint32(b[8:], seq)
	req := b[unix.SizeofNlMsghdr:]
	req[0], req[1] = unix.AF_INET6, unix.IPPROTO_TCP
	if to.Addr().Is4() {
		req[0] = unix.AF_INET
	}
	req[2] = 1 << (diagInfo - 1) // without which the kernel does not tell of signatures
	ne.PutUint32(req[4:], 1<<tcpListen)
	id := req[8:] // inet_diag_sockid, seen from the listener
	binary.BigEndian.PutUint16(id[0:], to.Port())
	binary.BigEndian.PutUint16(id[2:], from.Port())
	copy(id[4:20], to.Addr().AsSlice())
	copy(id[20:36], from.Addr().AsSlice())
	ne.PutUint32(id[36:], loopbackIndex) // the way to every address of this host
	ne.PutUint64(id[40:], 1<<64-1)       // any cookie
	return b
}

func parseDiagReply(reply []byte) (o owner, err error) {
	ne := binary.NativeEndian
	switch {
	case len(reply) >= unix.SizeofNlMsghdr+4 && ne.Uint16(reply[4:]) == unix.NLMSG_ERROR:
		errno := unix.Errno(-int32(ne.Uint32(reply[unix.SizeofNlMsghdr:])))
		if errno == unix.ENOENT {
			return o, errNotFound
		}
		return o, fmt.Errorf("shm: sock_diag: %w", errno)
	case len(reply) < diagReplySize || ne.Uint16(reply[4:]) != unix.SOCK_DIAG_BY_FAMILY:
		return o, errors.New("shm: sock_diag: an answer of another kind")
	}
	m := reply[unix.SizeofNlMsghdr:]
	if m[1] != tcpListen {
		return o, fmt.Errorf("shm: a socket in state %d has these addresses", m[1])
	}
	o.uid = ne.Uint32(m[64:])
	o.inode = ne.Uint32(m[68:])
	o.signed = hasAttribute(reply[diagReplySize:], diagMD5)
	return o, nil
}

// hasAttribute reports whether one of a list of netlink attributes has a type.
func hasAttribute(list []byte, kind uint16) bool {
	for len(list) >= unix.SizeofRtAttr {
		n := int(binary.NativeEndian.Uint16(list))
		if binary.NativeEndian.Uint16(list[2:]) == kind {
			return true
		}
		if n = (n + 3) &^ 3; n < unix.SizeofRtAttr || n > len(list) {
			return false
		}
		list = list[n:]
	}
	return false
}

// socketInode is the inode number as socket diagnosis gives it.
func socketInode(fd int) (uint32, error) {
	var st unix.Stat_t
	err := unix.Fstat(fd, &st)
	return uint32(st.Ino), err
}

// diagWorks checks that this kernel finds a listener of our own: without the module
// tcp_diag it says "no such listener" about all. A success is remembered.
func diagWorks() error {
	if diagProven.Load() {
		return nil
	}
	diagMu.Lock()
	defer diagMu.Unlock()
	if diagProven.Load() {
		return nil
	}
	err := func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		lo := netip.AddrFrom4([4]byte{127, 0, 0, 1})
		if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: lo.As4()}); err != nil {
			return err
		}
		if err := unix.Listen(fd, 1); err != nil {
			return err
		}
		at, err := boundAddr(fd)
		if err != nil {
			return err
		}
		inode, err := socketInode(fd)
		if err != nil {
			return err
		}
		o, err := diagnose(netip.AddrPortFrom(lo, 1), at)
		if err == nil && o.inode != inode {
			err = errors.New("shm: sock_diag found another socket")
		}
		return err
	}()
	if err != nil {
		return &session.Unavailable{Reason: session.ReasonNoProvider, Err: fmt.Errorf("shm: sock_diag does not work here: %w", err)}
	}
	diagProven.Store(true)
	return nil
}

var (
	diagMu     sync.Mutex // one check at a time; its system calls do not block
	diagProven atomic.Bool
)
