package san

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"syscall"
	"testing"
	"time"
)

// taken is a provider for which the first ports are taken.
type taken struct {
	*fake
	ports []int // on which it was to listen
	free  int   // how many are taken
}

func (p *taken) listen(tcp *net.TCPListener, s settings) (acceptor, error) {
	port := tcp.Addr().(*net.TCPAddr).Port
	if p.ports = append(p.ports, port); len(p.ports) <= p.free {
		return nil, fmt.Errorf("taken: listen on %d: %w", port, syscall.EADDRINUSE)
	}
	return p.fake.listen(tcp, s)
}

// If any port will do, the listener gets one that is free on the SAN, too. A port that was
// given is not replaced.
func TestPortTakenOnTheSANSide(t *testing.T) {
	for _, tt := range []struct {
		taken, tries int
		given, ok    bool
	}{
		{0, 1, false, true}, {2, 3, false, true}, {9, portTries, false, false}, {1, 1, true, false},
	} {
		p := &taken{fake: useFake(t), free: tt.taken}
		useProviders(t, p)
		address := "127.0.0.1:0"
		if tt.given {
			l, err := net.Listen("tcp", address)
			if err != nil {
				t.Fatal(err)
			}
			address = l.Addr().String()
			l.Close()
		}
		l, err := (&ListenConfig{Policy: Require}).Listen(t.Context(), "tcp", address)
		if ok := err == nil; ok != tt.ok || len(p.ports) != tt.tries {
			t.Errorf("%+v: Listen: %v; tried the ports %v", tt, err, p.ports)
		}
		if err != nil {
			continue
		}
		if c, err := (&Dialer{Policy: Require}).Dial("tcp", l.Addr().String()); err != nil {
			t.Error(err)
		} else {
			wantProvider(t, c, fakeName)
			c.Close()
		}
		l.Close()
	}
}

// lateTaken is a provider that finds its first port taken once the other one's has a
// connection there.
type lateTaken struct {
	*fake
	dialed net.Conn // nil: nobody has dialed yet
}

func (p *lateTaken) name() string { return "late" }

func (p *lateTaken) listen(tcp *net.TCPListener, _ settings) (acceptor, error) {
	if p.dialed != nil {
		return nil, &Unavailable{Reason: ReasonNotServed, Err: errors.New("not here")}
	}
	c, err := (&Dialer{Policy: Require}).Dial("tcp", tcp.Addr().String())
	if err != nil {
		return nil, err
	}
	p.dialed = c
	return nil, fmt.Errorf("late: listen: %w", syscall.EADDRINUSE)
}

// A connection to a port that is given up for another is reset.
func TestConnectionToAPortThatIsGivenUp(t *testing.T) {
	f := useFake(t)
	p := &lateTaken{fake: f}
	useProviders(t, f, p)
	l, err := (&ListenConfig{Policy: Require}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if p.dialed == nil {
		t.Fatal("nobody has dialed the first port")
	}
	defer p.dialed.Close()
	p.dialed.SetDeadline(time.Now().Add(testTimeout))
	if _, err := p.dialed.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("Read: %v", err)
	}
}

// refusing is a provider that never listens.
type refusing struct {
	*fake
	called string
	why    error
}

func (p *refusing) name() string { return p.called }

func (p *refusing) listen(*net.TCPListener, settings) (acceptor, error) {
	return nil, p.why
}

// What a listener lacks is reported and counted even if it has another SAN. That an address
// is not served never hides another provider's reason.
func TestListenerReportsWhatItLacks(t *testing.T) {
	f := useFake(t)
	absent := &refusing{f, "absent", &Unavailable{Reason: ReasonNotServed, Err: errors.New("not here")}}
	missing := &refusing{f, "missing", &Unavailable{Reason: ReasonNoProvider}}
	busy := &refusing{f, "busy", fmt.Errorf("listen: %w", syscall.EADDRINUSE)}
	for _, tt := range []struct {
		providers []provider
		has       []string
		lacks     map[string]Reason
		counted   map[Reason]uint64
	}{
		{[]provider{f}, []string{fakeName}, nil, nil},
		{[]provider{absent, f, missing}, []string{fakeName}, map[string]Reason{"absent": ReasonNotServed, "missing": ReasonNoProvider}, nil},
		{[]provider{f, busy}, []string{fakeName}, map[string]Reason{"busy": ReasonResources}, map[Reason]uint64{ReasonResources: 1}},
		{[]provider{absent, busy}, nil, map[string]Reason{"absent": ReasonNotServed, "busy": ReasonResources}, map[Reason]uint64{ReasonResources: 1}},
		{[]provider{absent, missing}, nil, map[string]Reason{"absent": ReasonNotServed, "missing": ReasonNoProvider}, map[Reason]uint64{ReasonNotServed: 1}},
	} {
		useProviders(t, tt.providers...)
		before := Stats().Listeners
		l, err := (&ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		if got := l.(*Listener).Providers(); !slices.Equal(got, tt.has) {
			t.Errorf("%v: it has %v, want %v", tt.lacks, got, tt.has)
		}
		got := l.(*Listener).Unavailable()
		if len(got) != len(tt.lacks) {
			t.Errorf("it lacks %v, want %v", got, tt.lacks)
		}
		for name, reason := range tt.lacks {
			if got[name] == nil || got[name].Reason != reason {
				t.Errorf("%s: %v, want %v", name, got[name], reason)
			}
		}
		for reason, n := range Stats().Listeners {
			if n -= before[reason]; n != tt.counted[reason] {
				t.Errorf("it lacks %v: %d counted for %v, want %d", got, n, reason, tt.counted[reason])
			}
		}
		if len(tt.has) > 0 {
			continue
		}
		want := ReasonNotServed
		if got["busy"] != nil {
			want = ReasonResources
		}
		_, err = (&ListenConfig{Policy: Require}).Listen(t.Context(), "tcp", "127.0.0.1:0")
		if why := new(Unavailable); !errors.As(err, &why) || why.Reason != want {
			t.Errorf("required: %v, want %v", err, want)
		}
	}
}

// A listener on a link-local address has its SAN like any other, though the kernel may not
// return the zone. In the guest one is on the RDMA device's own interface.
func TestListenOnLinkLocal(t *testing.T) {
	for address, want := range map[string]string{"[fe80::1%eth0]:80": "eth0", "[fe80::1]:80": "", "192.0.2.1:80": "", "host%x:80": "", ":80": ""} {
		if got := zoneOf(address); got != want {
			t.Errorf("%s: zone %q, want %q", address, got, want)
		}
	}
	if inGuest == "" {
		return
	}
	l := mustListen(t, &ListenConfig{Policy: Require, Providers: []string{"verbs"}}, "tcp", net.JoinHostPort(linkLocal(t, systemLanes[0].host), "0"))
	if got := l.Providers(); !slices.Equal(got, []string{"verbs"}) {
		t.Errorf("on %v: %v", l.Addr(), got)
	}
}

// linkLocal is the link-local address, with its zone, of the interface that has ip.
func linkLocal(t *testing.T, ip string) string {
	t.Helper()
	all, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range all {
		addrs, _ := i.Addrs()
		local, found := "", false
		for _, a := range addrs {
			p, _ := netip.ParsePrefix(a.String())
			found = found || p.Addr().String() == ip
			if p.Addr().Is6() && p.Addr().IsLinkLocalUnicast() {
				local = p.Addr().String() + "%" + i.Name
			}
		}
		if found && local != "" {
			return local
		}
	}
	t.Fatalf("no link-local address beside %s", ip)
	return ""
}

// A provider knows that a listener takes no IPv4, be it because of the network or of the
// TCP socket.
func TestListenerOfIPv6Alone(t *testing.T) {
	f := useFake(t)
	for network, alone := range map[string]bool{"tcp": false, "tcp4": false, "tcp6": true} {
		address := "[::]:0"
		if network == "tcp4" {
			address = "0.0.0.0:0"
		}
		l, err := Listen(network, address)
		if err != nil {
			t.Fatal(err)
		}
		if got := f.listened.v6only; got != alone {
			t.Errorf("%s: IPv6 alone: %v, want %v", network, got, alone)
		}
		if got := v6only(l.(*Listener).tcp); got != alone {
			t.Errorf("%s: the TCP socket is for IPv6 alone: %v, want %v", network, got, alone)
		}
		l.Close()
	}
}
