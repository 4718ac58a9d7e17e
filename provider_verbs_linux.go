package san

import (
	"cmp"
	"context"
	"errors"
	"net"
	"net/netip"
	"syscall"
	"time"

	"github.com/sanconn/san/provider/verbs"
)

// verbsProvider is the provider for connections to other hosts.
type verbsProvider struct{}

func (verbsProvider) name() string { return verbs.Name }

func (p verbsProvider) serves(dst netip.Addr, s settings) error {
	_, err := verbs.ServedBy(dst, verbs.Route{Source: s.source}, p.config(s))
	return err
}

// slow implements slowNetwork.
func (verbsProvider) slow(dst netip.Addr, s settings) time.Duration {
	return verbs.PathTime(dst, verbs.Route{Source: s.source})
}

func (verbsProvider) config(s settings) verbs.Config {
	return verbs.Config{
		Disable:   s.session.Disable,
		Threshold: max(s.session.Threshold, 0),
		Backlog:   s.backlog,

		IWARPOffset:  s.rdma.IWARPOffset,
		WithoutCM:    s.rdma.WithoutCM,
		TrafficClass: s.rdma.TrafficClass,
		ServiceLevel: s.rdma.ServiceLevel,
		AckTimeout:   s.rdma.AckTimeout,
		Subnets:      s.subnets,
		SharedDomain: s.sharedDomain,
	}
}

func (p verbsProvider) listen(tcp *net.TCPListener, s settings) (acceptor, error) {
	at := tcp.Addr().(*net.TCPAddr).AddrPort()
	cfg := p.config(s)
	cfg.V6Only = s.v6only
	cfg.TakeOver = s.takeOver
	if rc, err := tcp.SyscallConn(); err == nil && cfg.TrafficClass == 0 {
		rc.Control(func(fd uintptr) { cfg.TrafficClass = trafficClass(int(fd)) })
	}
	addr := at.Addr().Unmap()
	if addr.IsLinkLocalUnicast() && addr.Zone() == "" {
		addr = addr.WithZone(s.zone)
	}
	l, err := verbs.Listen(netip.AddrPortFrom(addr, at.Port()), cfg)
	if err != nil {
		return nil, err
	}
	return verbsListener{l}, nil
}

// dial connects from a TCP port that the transport holds, so that its address is not given to others.
// On iWARP and without rdma_cm the endpoint chooses another port, and none is held.
func (p verbsProvider) dial(ctx context.Context, r request) (transport, error) {
	cfg := p.config(r.settings)
	cfg.FixedPort = r.local != nil && r.local.Port != 0
	for try := 1; ; try++ {
		socket, err := bind(ctx, r)
		if err != nil {
			return transport{}, err
		}
		ep, err := p.dialFrom(ctx, socket, r.remote, cfg)
		if err == nil {
			t := verbsTransport(ep)
			if int(ep.LocalAddr().Port()) == socket.local.Port {
				t.hold = socket
			} else {
				socket.Close()
			}
			return t, nil
		}
		socket.Close()
		if try == portTries || !errors.Is(err, syscall.EADDRINUSE) || cfg.FixedPort {
			return transport{}, err
		}
	}
}

// dialFrom connects as the socket would, by its route and in its traffic class.
func (verbsProvider) dialFrom(ctx context.Context, s *boundSocket, remote netip.AddrPort, cfg verbs.Config) (*verbs.Endpoint, error) {
	local := s.local.AddrPort()
	local = netip.AddrPortFrom(local.Addr().Unmap(), local.Port())
	mark, device := s.steering()
	var err error
	cfg.Device, err = verbs.ServedBy(remote.Addr(), verbs.Route{Source: local.Addr(), Interface: device, Mark: mark}, cfg)
	if err != nil {
		return nil, &Unavailable{Reason: ReasonNotServed, Err: err}
	}
	cfg.TrafficClass = cmp.Or(cfg.TrafficClass, trafficClass(s.fd))
	return verbs.Dial(ctx, local, remote, cfg)
}

func verbsTransport(ep *verbs.Endpoint) transport {
	return transport{
		endpoint: ep,
		local:    net.TCPAddrFromAddrPort(ep.LocalAddr()),
		remote:   net.TCPAddrFromAddrPort(ep.RemoteAddr()),
	}
}

type verbsListener struct{ *verbs.Listener }

func (l verbsListener) accept() (transport, error) {
	ep, err := l.Accept()
	if err != nil {
		return transport{}, err
	}
	t := verbsTransport(ep)
	t.user = t.remote.IP.String()
	return t, nil
}
