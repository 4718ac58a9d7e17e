package verbs

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"testing"

	"github.com/sanconn/san/session"
)

// Without rdma_cm, a listener of IPv4 alone takes no IPv6 where the ends meet.
func TestExchangeIsOfItsFamilyAlone(t *testing.T) {
	cfg := Config{WithoutCM: true}.withDefaults()
	l := &Listener{cfg: cfg, addr: netip.AddrPortFrom(netip.IPv4Unspecified(), unusedPort(t, cfg))}
	ctx, cancel := context.WithCancel(t.Context())
	defer l.work.Wait()
	defer cancel()
	l.ctx = ctx
	if err := l.serveExchange(); err != nil {
		t.Fatal(err)
	}
	side := cfg.iwarpPort(l.addr.Port())
	c, err := net.DialTCP("tcp4", nil, net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), side)))
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	c, err = net.DialTCP("tcp6", nil, net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.IPv6Loopback(), side)))
	if err == nil {
		c.Close()
		t.Error("it takes IPv6")
	}
}

// unusedPort is a TCP port whose port for RDMA is free.
func unusedPort(t *testing.T, cfg Config) uint16 {
	t.Helper()
	for range 100 {
		l, err := net.ListenTCP("tcp", nil)
		if err != nil {
			t.Fatal(err)
		}
		l.Close()
		port := l.Addr().(*net.TCPAddr).AddrPort().Port()
		if side, err := net.ListenTCP("tcp", &net.TCPAddr{Port: int(cfg.iwarpPort(port))}); err == nil {
			side.Close()
			return port
		} else if !errors.Is(err, syscall.EADDRINUSE) {
			t.Fatal(err)
		}
	}
	t.Fatal("no port is free")
	return 0
}

// … and a connection does not leave from another port than the program's.
func TestFixedPortWithoutCM(t *testing.T) {
	to := netip.MustParseAddrPort("127.0.0.1:1")
	if _, err := Dial(t.Context(), netip.AddrPort{}, to, Config{WithoutCM: true, FixedPort: true}); reasonOf(err) != session.ReasonNotServed {
		t.Errorf("error %v", err)
	}
}

// What a listener refuses with, and what its dialer makes of it: TCP, but for a full
// backlog.
func TestMeaningOfRefusals(t *testing.T) {
	for refusal, want := range map[refusal]session.Reason{
		refusedBacklog:   session.ReasonNone,
		refusedVersion:   session.ReasonProtocol, // of the version that we speak
		refusedResources: session.ReasonResources,
		refusedSubnet:    session.ReasonPermission,
		refusedClosed:    session.ReasonNoListener,
		refusedAddress:   session.ReasonUnreachable,
		refusedDevice:    session.ReasonUnreachable,
		77:               session.ReasonProtocol,
	} {
		h, ok := parsePrivateData(privateData{protocolVersion, refusal}.bytes())
		err := h.err()
		if !ok || reasonOf(err) != want || errors.Is(err, syscall.ECONNREFUSED) != (refusal == refusedBacklog) {
			t.Errorf("refusal %d: %v", refusal, err)
		}
	}
	for _, tt := range []struct {
		err  error
		want refusal
	}{
		{fmt.Errorf("a device: %w", syscall.EINVAL), refusedDevice},
		{errors.New("unheard of"), refusedDevice},
		{fmt.Errorf("control buffers: %w", syscall.ENOMEM), refusedResources},
		{fmt.Errorf("an arena: %w", syscall.ENOBUFS), refusedResources},
		{errNoneServed, refusedAddress},
		{unavailable(session.ReasonUnreachable, fmt.Errorf("no GID: %w", syscall.EINVAL)), refusedAddress},
		{unavailable(session.ReasonResources, fmt.Errorf("being closed: %w", syscall.EBUSY)), refusedResources},
	} {
		if got := refusalFor(tt.err); got != tt.want {
			t.Errorf("for %q it refuses with %d, want %d", tt.err, got, tt.want)
		}
	}
	if h, _ := parsePrivateData(privateData{version: protocolVersion + 1}.bytes()); reasonOf(h.err()) != session.ReasonVersion {
		t.Errorf("another version: %v", h.err())
	}
}
