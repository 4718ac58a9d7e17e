package moving

import (
	"cmp"
	"context"
	"errors"
	"io"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/hello"
	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/rdmalink"
	"github.com/sanconn/san/internal/reason"
	"github.com/sanconn/san/internal/tcpid"
	"github.com/sanconn/san/provider/verbs"
	"github.com/sanconn/san/session"
)

// verbsProvider is the provider between hosts.
type verbsProvider struct{}

func (verbsProvider) Name() string { return verbs.Name }

func (verbsProvider) config(s Settings) verbs.Config {
	return verbs.Config{
		Disable:   s.Session.Disable,
		Threshold: max(s.Session.Threshold, 0),

		IWARPOffset:  s.RDMA.IWARPOffset,
		WithoutCM:    s.RDMA.WithoutCM,
		TrafficClass: s.RDMA.TrafficClass,
		ServiceLevel: s.RDMA.ServiceLevel,
		AckTimeout:   s.RDMA.AckTimeout,
		Subnets:      s.Subnets,
		SharedDomain: s.SharedDomain,
	}
}

// NeedsStamp implements Provider. Each queue pair is requested with the stamp's proof, so there is no
// other way by which Move could do. Whether a device serves the destination depends on routes and
// interfaces; no dial waits for that look, which Move takes.
func (verbsProvider) NeedsStamp(tcp *net.TCPConn, _ Settings) bool {
	return (rdmalink.Loopback() || !tcp.RemoteAddr().(*net.TCPAddr).IP.IsLoopback()) && verbs.HaveDevices()
}

// served returns the device that serves a connection's destination. An error for lack of descriptors or
// memory leaves open whether there is one.
func (verbsProvider) served(tcp *net.TCPConn, cfg verbs.Config) (device string, err error) {
	route, _ := routeOf(tcp)
	route.Source = zoned(tcp.LocalAddr()).Addr()
	device, err = verbs.ServedBy(zoned(tcp.RemoteAddr()).Addr(), route, cfg)
	if err != nil && reason.Of(err).Reason != session.ReasonResources {
		err = &session.Unavailable{Reason: session.ReasonNotServed, Err: err}
	}
	return device, err
}

// zoned returns an address with its zone, which a link-local address needs.
func zoned(tcp net.Addr) netip.AddrPort {
	a := tcp.(*net.TCPAddr).AddrPort()
	return netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
}

// Stamps reports whether there is a device, as connections over RDMA are proved by stamps.
func (verbsProvider) Stamps(Settings) bool { return verbs.HaveDevices() }

func (verbsProvider) Hold(*net.TCPConn, Settings) (io.Closer, error) { return nil, nil }

// Move connects by the TCP connection's route to the port of the TCP connection, and proves by the
// connection's stamp that both are between the same ends.
func (p verbsProvider) Move(ctx context.Context, h newconn.Handle, s Settings) error {
	tcp := h.TCP()
	ends, err := tcpid.EndsOf(tcp)
	if err != nil {
		return err
	}
	cfg := p.config(s)
	if cfg.Device, err = p.served(tcp, cfg); err != nil {
		return err
	}
	_, class := routeOf(tcp)
	cfg.TrafficClass = cmp.Or(cfg.TrafficClass, class)
	cfg.Claim.Port = ends.Local.Port()
	return lifeOf(h).prove(tcp, func(stamp tcpid.Stamp) error {
		cfg.Claim.Proof = stamp.Challenge()
		ep, err := verbs.Dial(ctx, zoned(tcp.LocalAddr()).Addr(), zoned(tcp.RemoteAddr()), cfg)
		switch {
		case errors.Is(err, verbs.ErrUnknown):
			return hello.Answer{Code: hello.Unknown}.Err()
		case errors.Is(err, verbs.ErrOther):
			return hello.Answer{Code: hello.Other}.Err()
		case err != nil:
			return err
		}
		return proposeStamped(ctx, ep, s, h, ends, stamp)
	})
}

// routeOf returns the options of a socket that decide its route, and its traffic class.
func routeOf(tcp *net.TCPConn) (r verbs.Route, class uint8) {
	rc, err := tcp.SyscallConn()
	if err != nil {
		return r, 0
	}
	rc.Control(func(fd uintptr) {
		mark, _ := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK)
		r.Mark = uint32(mark)
		r.Interface, _ = unix.GetsockoptString(int(fd), unix.SOL_SOCKET, unix.SO_BINDTODEVICE)
		class = trafficClass(int(fd))
	})
	return r, class
}

// trafficClass returns a socket's TOS or traffic class.
func trafficClass(fd int) uint8 {
	if v, err := unix.GetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_TCLASS); err == nil && v > 0 {
		return uint8(v)
	}
	v, _ := unix.GetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_TOS)
	return uint8(v)
}

func (p verbsProvider) Listen(tcp *net.TCPListener, s Settings) (Acceptor, error) {
	at := tcp.Addr().(*net.TCPAddr).AddrPort()
	cfg := p.config(s)
	cfg.V6Only, cfg.Admit = s.V6Only, admit
	if rc, err := tcp.SyscallConn(); err == nil {
		rc.Control(func(fd uintptr) {
			cfg.TrafficClass = cmp.Or(cfg.TrafficClass, trafficClass(int(fd)))
			if only, err := unix.GetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_V6ONLY); err == nil && only != 0 {
				cfg.V6Only = true
			}
		})
	}
	addr := at.Addr().Unmap()
	if addr.IsLinkLocalUnicast() && addr.Zone() == "" {
		addr = addr.WithZone(s.Zone)
	}
	l, err := verbs.Listen(netip.AddrPortFrom(addr, at.Port()), cfg, func(ep *verbs.Endpoint) {
		Receive(Came{Endpoint: ep, Provider: verbs.Name}, s.Session)
	})
	if err != nil {
		return nil, err
	}
	if err := tcpid.SaveSYN(tcp); err != nil {
		l.Close()
		return nil, &session.Unavailable{Reason: session.ReasonNotServed, Err: err}
	}
	return verbsAcceptor{l}, nil
}

type verbsAcceptor struct{ *verbs.Listener }

// Lacks implements Acceptor. Another process may have to close its listener first.
func (a verbsAcceptor) Lacks() (why error, all bool) {
	why = a.Waiting()
	return why, why != nil
}

// admit decides about a request before its queue pair is made, by the TCP connection that the request
// names. Connections that the host's packet filter keeps from TCP are not in the table.
func admit(local, remote netip.AddrPort, proof uint16) error {
	c := accepted.at(tcpid.Ends{Local: local, Remote: remote})
	if c == nil {
		return verbs.ErrUnknown
	}
	h := newconn.HandleOf(c)
	if _, ok := lifeOf(h).proof.Answer(h.TCP(), proof); !ok {
		return verbs.ErrOther
	}
	return nil
}
