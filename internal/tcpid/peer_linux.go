package tcpid

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/sockdiag"
)

// Cookie returns the kernel's number of this end's socket, which no other socket has had since the host
// started. The cookie of a Multipath TCP socket is not the one of its TCP connection, so Peer never
// returns it.
func Cookie(c *net.TCPConn) (uint64, error) {
	return control(c, cookieOf)
}

func cookieOf(fd int) (uint64, error) {
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
	return cookie, wrap("SO_COOKIE", err)
}

// Hold keeps a socket for queries about the network namespace of a connection or listener, until
// release is called. Meanwhile Peer works for connections of that namespace on every thread, and costs
// less. Unless the namespace is held already, the calling thread must be in it: call Hold where the
// socket is made.
func Hold(c syscall.Conn) (release func(), err error) {
	netns, err := control(c, namespaceOf)
	if err != nil {
		return nil, err
	}
	a, err := askers.get(netns)
	if err != nil {
		return nil, err
	}
	return sync.OnceFunc(func() { askers.drop(a) }), nil
}

// Peer gets from the kernel the socket at the other end of a connection. ErrNotHere means that the
// connection's network namespace has no such socket; or that it is bound to an interface to which this
// end is not bound; or that the kernel lacks the module tcp_diag. Peer does not block.
func Peer(c *net.TCPConn) (Socket, error) {
	e, err := EndsOf(c)
	if err != nil {
		return Socket{}, err
	}
	o, err := control(c, ownOf)
	if err != nil {
		return Socket{}, err
	}
	return peerOf(e, o)
}

// own is what Peer needs to know about this end's socket.
type own struct {
	netns  uint64 // the network namespace; 0: not known
	iface  uint32
	cookie uint64 // only if netns is not known
}

func ownOf(fd int) (o own, err error) {
	o.iface = interfaceOf(fd)
	if o.netns, err = namespaceOf(fd); err == nil && o.netns == 0 {
		o.cookie, err = cookieOf(fd)
	}
	return o, err
}

func peerOf(e Ends, o own) (Socket, error) {
	a, err := askers.get(o.netns)
	if err != nil {
		return Socket{}, err
	}
	defer askers.drop(a)
	if o.netns == 0 {
		// This thread is in the connection's namespace if it finds this end's own socket.
		s, err := a.ask(e, o.iface)
		if err != nil {
			return Socket{}, err
		}
		if s.Cookie != o.cookie {
			return Socket{}, errNotThisThread
		}
	}
	s, err := a.ask(e.Reversed(), o.iface)
	if err == nil && s.Accepted {
		// Query again. The kernel reads the socket's user before it reads whether the socket is
		// accepted, and the accept may have come in between (inet_diag_msg_attrs_fill in
		// ipv4/inet_diag.c).
		s, err = a.ask(e.Reversed(), o.iface)
	}
	return s, err
}

// errNotThisThread: a network namespace can only be queried by a thread in it, or by a socket that was
// made there.
var errNotThisThread = fmt.Errorf("%w, and this thread is in another", ErrNotHere)

// namespaceOf returns the kernel's number of a socket's network namespace, or 0 before Linux 5.14,
// which has no such number.
func namespaceOf(fd int) (uint64, error) {
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err == unix.ENOPROTOOPT {
		return 0, nil
	}
	return cookie, wrap("SO_NETNS_COOKIE", err)
}

// loopbackIndex is the index of lo in every network namespace. All packets within a host pass lo.
const loopbackIndex = 1

// interfaceOf returns the interface for a query of the other end. The kernel finds a socket that is
// bound to an interface only by that interface, and an unbound one by any. Sockets with link-local
// addresses are always bound.
func interfaceOf(fd int) uint32 {
	if i, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_BINDTOIFINDEX); err == nil && i > 0 {
		return uint32(i)
	}
	return loopbackIndex
}

// Namespace returns the kernel's number of a socket's network namespace, or 0 if it is not known.
func Namespace(c syscall.Conn) uint64 {
	n, _ := control(c, namespaceOf)
	return n
}

// CheckThread returns an error that is ErrNotHere if the connection is known to be in another network
// namespace than the calling thread.
func CheckThread(c *net.TCPConn) error {
	netns, err := control(c, namespaceOf)
	if err != nil || netns == 0 {
		return err
	}
	fd, err := openIn(netns)
	if err == nil {
		unix.Close(fd)
	}
	return err
}

// control calls f with the descriptor of a connection or listener.
func control[T any](c syscall.Conn, f func(fd int) (T, error)) (v T, err error) {
	rc, err := c.SyscallConn()
	if err != nil {
		return v, err
	}
	if closed := rc.Control(func(fd uintptr) { v, err = f(int(fd)) }); closed != nil {
		return v, closed
	}
	return v, err
}

func wrap(what string, err error) error {
	if err != nil {
		return fmt.Errorf("tcpid: %s: %w", what, err)
	}
	return nil
}

// asker queries the sockets of the network namespace in which its own socket was made.
type asker struct {
	netns uint64 // 0: not shared
	uses  int    // guarded by the set's mu

	mu   sync.Mutex // guards the fields below, and is held from the request to the answer: the kernel answers within write
	fd   int
	seq  uint32
	room [1024]byte // for the answer
}

// askerSet has an asker for each network namespace that is held or is being queried. An asker keeps its
// namespace alive, so it is closed with its last use.
type askerSet struct {
	mu sync.Mutex // guards by and the askers' uses; no system call is made under it
	by map[uint64]*asker
}

var askers = askerSet{by: make(map[uint64]*asker)}

func (s *askerSet) get(netns uint64) (*asker, error) {
	if a := s.have(netns, nil); a != nil {
		return a, nil
	}
	fd, err := openIn(netns)
	if err != nil {
		return nil, err
	}
	a := &asker{netns: netns, fd: fd}
	if first := s.have(netns, a); first != a {
		unix.Close(fd) // another goroutine was faster
		return first, nil
	}
	return a, nil
}

// openIn returns a socket for queries, if the calling thread is in the network namespace netns; 0: any.
func openIn(netns uint64) (fd int, err error) {
	fd, err = sockdiag.Open()
	if err != nil {
		return -1, wrap("sock_diag", err)
	}
	here, err := namespaceOf(fd)
	if err == nil && netns != 0 && here != netns {
		err = errNotThisThread
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// have returns a namespace's asker with its uses increased: the present one, or else a, which may be
// nil.
func (s *askerSet) have(netns uint64, a *asker) *asker {
	s.mu.Lock()
	defer s.mu.Unlock()
	if there := s.by[netns]; there != nil {
		a = there
	}
	if a != nil {
		a.uses++
		if netns != 0 {
			s.by[netns] = a
		}
	}
	return a
}

func (s *askerSet) drop(a *asker) {
	s.mu.Lock()
	a.uses--
	last := a.uses == 0
	if last && a.netns != 0 {
		delete(s.by, a.netns)
	}
	s.mu.Unlock()
	if last {
		unix.Close(a.fd)
	}
}

// The sizes of request and answer: include/uapi/linux/inet_diag.h.
const (
	requestSize = 56 // inet_diag_req_v2
	answerSize  = 72 // inet_diag_msg
	anyCookie   = 1<<64 - 1
)

// ask returns the socket that has the addresses e, seen from its own end.
func (a *asker) ask(e Ends, iface uint32) (Socket, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.seq++
	request := requestOf(e, iface)
	for answer, err := range sockdiag.Ask(a.fd, 0, a.seq, request[:], a.room[:]) {
		switch {
		case err == nil:
			return parseAnswer(answer, e)
		case err != unix.ENOENT:
			return Socket{}, wrap("sock_diag", err)
		}
	}
	return Socket{}, ErrNotHere
}

func requestOf(e Ends, iface uint32) (req [requestSize]byte) {
	ne := binary.NativeEndian
	req[0], req[1] = unix.AF_INET6, unix.IPPROTO_TCP
	if e.Local.Addr().Is4() {
		req[0] = unix.AF_INET // also finds IPv4 connections of IPv6 sockets
	}
	ne.PutUint32(req[4:], 1<<32-1) // any state
	id := req[8:]                  // inet_diag_sockid
	putAddr(id[0:], id[4:20], e.Local)
	putAddr(id[2:], id[20:36], e.Remote)
	ne.PutUint32(id[36:], iface)
	ne.PutUint64(id[40:], anyCookie)
	return req
}

func putAddr(port, addr []byte, a netip.AddrPort) {
	binary.BigEndian.PutUint16(port, a.Port())
	copy(addr, a.Addr().AsSlice())
}

func parseAnswer(m []byte, e Ends) (Socket, error) {
	ne := binary.NativeEndian
	if len(m) < answerSize {
		return Socket{}, errors.New("tcpid: sock_diag: an answer of another kind")
	}
	// If no connection has these addresses, the kernel may return a listener that would accept one.
	id := m[4:]
	found := Ends{getAddr(m[0], id[0:], id[4:20]), getAddr(m[0], id[2:], id[20:36])}
	if m[1] == stateListen || found != e {
		return Socket{}, ErrNotHere
	}
	return Socket{
		Cookie:   ne.Uint64(id[40:]),
		UID:      ne.Uint32(m[64:]),
		Accepted: ne.Uint32(m[68:]) != 0,
	}, nil
}

func getAddr(family byte, port, addr []byte) netip.AddrPort {
	if family == unix.AF_INET {
		addr = addr[:4]
	}
	a, _ := netip.AddrFromSlice(addr)
	return plain(netip.AddrPortFrom(a, binary.BigEndian.Uint16(port)))
}
