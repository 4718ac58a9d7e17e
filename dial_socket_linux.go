package san

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
)

// boundSocket is a TCP socket that is bound but never connects. It lends its local address
// to a connection over a SAN, so that nobody else can have the address while the connection
// lives. It is also what the dialer's hooks see.
type boundSocket struct {
	fd    int
	local *net.TCPAddr
}

// bind makes a socket with the local address that a TCP connection for this request would
// have.
func bind(ctx context.Context, r request) (*boundSocket, error) {
	family := unix.AF_INET6
	if r.remote.Addr().Is4() {
		family = unix.AF_INET
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	s := &boundSocket{fd: fd}
	if err := s.bind(ctx, r); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

func (s *boundSocket) bind(ctx context.Context, r request) error {
	if r.control != nil {
		if err := r.control(ctx, r.network, r.remote.String(), rawSocket(s.fd)); err != nil {
			return hookError{err}
		}
		if s.name() == nil && s.local.Port != 0 {
			return nil // the hook has bound it
		}
	}
	from, err := s.source(r)
	if err != nil {
		return err
	}
	sa, err := sockaddr(from)
	if err != nil {
		return err
	}
	if err := unix.Bind(s.fd, sa); err != nil {
		return os.NewSyscallError("bind", err)
	}
	if err := s.name(); err != nil {
		return err
	}
	// connect cannot use a port that is bound, to whatever address. Leave TCP the half that
	// it prefers, since it is the fallback when ports run out. (A hook may have chosen the
	// port from another range.)
	if from.Port() == 0 && r.control == nil && isConnects(s.local.Port) {
		return &Unavailable{Reason: ReasonResources,
			Err: errors.New("half of net.ipv4.ip_local_port_range is bound, and the rest is TCP's")}
	}
	return nil
}

// isConnects reports whether a port is one of those that connect tries first: those with
// the parity of the range's lower bound. bind takes them only when it finds no others
// (inet_csk_find_open_port, since Linux 4.5). The range may change, so it is read again
// before the answer is yes; if it cannot be read the answer is no.
func isConnects(port int) bool {
	if int32(port&1) != connectsParity.Load()&1 {
		return false
	}
	low := 0
	b, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if err == nil {
		_, err = fmt.Sscan(string(b), &low)
	}
	if err != nil {
		return false
	}
	connectsParity.Store(int32(low & 1))
	return port&1 == low&1
}

// connectsParity is the lower bound's parity when it was last read; at first that of
// Linux's default, which is even.
var connectsParity atomic.Int32

// name sets local to the address that the socket is bound to.
func (s *boundSocket) name() error {
	sa, err := syscall.Getsockname(s.fd) // that of unix also asks for the protocol
	if err != nil {
		return os.NewSyscallError("getsockname", err)
	}
	switch sa := sa.(type) {
	case *syscall.SockaddrInet4:
		s.local = &net.TCPAddr{IP: net.IP(sa.Addr[:]), Port: sa.Port}
	case *syscall.SockaddrInet6:
		s.local = &net.TCPAddr{IP: net.IP(sa.Addr[:]), Port: sa.Port}
		if sa.ZoneId != 0 {
			s.local.Zone = strconv.Itoa(int(sa.ZoneId))
			if i, err := net.InterfaceByIndex(int(sa.ZoneId)); err == nil {
				s.local.Zone = i.Name
			}
		}
	}
	return nil
}

func (s *boundSocket) Close() error { return unix.Close(s.fd) }

// abandon closes a socket that a peer may have another descriptor of, so that TCP can have
// its address all the same: see netDialer.
func (s *boundSocket) abandon() {
	shareAddress(uintptr(s.fd))
	s.Close()
}

// source returns the local address that a TCP connection for this request would have.
func (s *boundSocket) source(r request) (netip.AddrPort, error) {
	var port uint16
	if l := r.local; l != nil {
		if port = uint16(l.Port); int(port) != l.Port {
			return netip.AddrPort{}, os.NewSyscallError("bind", unix.EINVAL) // as TCP will find, too
		}
		if ip, ok := netip.AddrFromSlice(l.IP); ok && !ip.IsUnspecified() {
			return netip.AddrPortFrom(ip.Unmap().WithZone(l.Zone), port), nil
		}
	}
	switch dst := r.remote.Addr(); {
	case dst.Is4() && dst.IsLoopback():
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), port), nil
	case dst.IsLoopback():
		return netip.AddrPortFrom(dst, port), nil
	}
	// A connected UDP socket has the source address that routing chooses. Nothing is
	// sent.
	var udp net.Dialer
	if r.control != nil {
		udp.Control = s.steer
	}
	c, err := udp.Dial("udp", r.remote.String())
	if err != nil {
		return netip.AddrPort{}, err
	}
	defer c.Close()
	from := c.LocalAddr().(*net.UDPAddr).AddrPort()
	return netip.AddrPortFrom(from.Addr().Unmap(), port), nil
}

// steering returns what the hooks have set that decides the socket's route: SO_MARK and
// SO_BINDTODEVICE.
func (s *boundSocket) steering() (mark uint32, device string) {
	m, _ := unix.GetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_MARK)
	device, _ = unix.GetsockoptString(s.fd, unix.SOL_SOCKET, unix.SO_BINDTODEVICE)
	return uint32(m), device
}

// steer sets the same for another socket.
func (s *boundSocket) steer(_, _ string, other syscall.RawConn) error {
	mark, device := s.steering()
	var err error
	if e := other.Control(func(fd uintptr) {
		if mark != 0 {
			err = os.NewSyscallError("setsockopt", unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, int(mark)))
		}
		if err == nil && device != "" {
			err = os.NewSyscallError("setsockopt", unix.BindToDevice(int(fd), device))
		}
	}); e != nil {
		return e
	}
	return err
}

// trafficClass is a socket's TOS or traffic class.
func trafficClass(fd int) uint8 {
	if v, err := unix.GetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_TCLASS); err == nil && v > 0 {
		return uint8(v)
	}
	v, _ := unix.GetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_TOS)
	return uint8(v)
}

func sockaddr(a netip.AddrPort) (unix.Sockaddr, error) {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}, nil
	}
	sa := &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
	if zone := a.Addr().Zone(); zone != "" {
		if n, err := strconv.ParseUint(zone, 10, 32); err == nil {
			sa.ZoneId = uint32(n)
			return sa, nil
		}
		i, err := net.InterfaceByName(zone)
		if err != nil {
			return nil, fmt.Errorf("zone %q: %w", zone, err)
		}
		sa.ZoneId = uint32(i.Index)
	}
	return sa, nil
}

// rawSocket is the hooks' view of a socket that is not connected.
type rawSocket int

func (s rawSocket) Control(f func(fd uintptr)) error {
	f(uintptr(s))
	return nil
}

func (rawSocket) Read(func(fd uintptr) bool) error  { return syscall.ENOTCONN }
func (rawSocket) Write(func(fd uintptr) bool) error { return syscall.ENOTCONN }
