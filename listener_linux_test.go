package san

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/internal/backlog"
	"github.com/sanconn/san/internal/testenv"
)

func TestListenErrorsAreThoseOfNet(t *testing.T) {
	useFake(t)
	taken := plainListen(t, "127.0.0.1:0").Addr().String()
	for _, c := range []struct{ name, network, address string }{
		{"unknown network", "tcp5", "127.0.0.1:0"},
		{"bad address", "tcp", "127.0.0.1"},
		{"bad port", "tcp", "127.0.0.1:http2000"},
		{"port in use", "tcp", taken},
		{"not an address of this host", "tcp", "192.0.2.1:0"},
		{"family without address", "tcp6", "127.0.0.1:0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, want := net.Listen(c.network, c.address)
			_, got := Listen(c.network, c.address)
			if want == nil || got == nil || got.Error() != want.Error() {
				t.Errorf("got  %v\nwant %v", got, want)
			}
		})
	}
	lc := &ListenConfig{Providers: []string{"warp"}}
	if _, err := lc.Listen(context.Background(), "tcp", "127.0.0.1:0"); err == nil {
		t.Error("an unknown provider is no error")
	}
}

func TestListenRequireNeedsAProvider(t *testing.T) {
	useProviders(t)
	lc := &ListenConfig{Policy: Require}
	_, err := lc.Listen(context.Background(), "tcp", "127.0.0.1:0")
	var why *Unavailable
	if !errors.As(err, &why) || why.Reason != ReasonNoProvider {
		t.Errorf("error %v", err)
	}
	wantOpError(t, err, "listen", why)
}

func TestAcceptTakesBothKindsAndTellsThemApart(t *testing.T) {
	useFake(t)
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	for range 5 {
		c := mustDial(t, &Dialer{}, l.Addr().String())
		wantProvider(t, c, fakeName)
		s := mustAccept(t, l)
		wantProvider(t, s, fakeName)
		say(t, s, c, "over the SAN")

		p := mustDial(t, &Dialer{Policy: Never}, l.Addr().String())
		ps := mustAccept(t, l)
		wantFallback(t, ps, ReasonPeerPlain)
		say(t, p, ps, "over TCP")
	}
}

// A plain client of a server that speaks first, or second, sees no byte that is
// not the application's.
func TestPlainClientSeesTheApplicationAlone(t *testing.T) {
	useFake(t)
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	p, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	s := mustAccept(t, l)
	say(t, s, p, "220 ready\r\n")
	say(t, p, s, "EHLO\r\n")
	s.Close()
	if rest, err := io.ReadAll(p); len(rest) != 0 || err != nil {
		t.Errorf("%d more bytes: %q, %v", len(rest), rest, err)
	}
}

// A dial succeeds before anybody calls Accept, and what it writes is kept until then.
func TestDialDoesNotWaitForAccept(t *testing.T) {
	useFake(t)
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	c := mustDial(t, &Dialer{Policy: Require}, l.Addr().String())
	if _, err := io.WriteString(c, "early"); err != nil {
		t.Fatal(err)
	}
	c.Close()
	got, err := io.ReadAll(mustAccept(t, l))
	if string(got) != "early" || err != nil {
		t.Errorf("read %q, %v", got, err)
	}
}

func TestListenerSlowDialerDelaysNobody(t *testing.T) {
	f := useFake(t)
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	f.silent.Store(true)
	go (&Dialer{}).Dial("tcp", l.Addr().String())
	<-f.connected
	f.silent.Store(false)
	wantProvider(t, mustDial(t, &Dialer{Policy: Require}, l.Addr().String()), fakeName)
}

func TestListenerBacklogFullIsRefusedAtOnce(t *testing.T) {
	useFake(t)
	const places = 3
	l := mustListen(t, &ListenConfig{Backlog: places}, "tcp", "127.0.0.1:0")
	conns := make(map[string]net.Conn)
	for range places {
		c := mustDial(t, &Dialer{}, l.Addr().String())
		conns[c.LocalAddr().String()] = c
	}
	_, err := new(Dialer).Dial("tcp", l.Addr().String())
	wantOpError(t, err, "dial", syscall.ECONNREFUSED)
	for range conns {
		s := mustAccept(t, l) // in the order in which they have negotiated
		say(t, conns[s.RemoteAddr().String()], s, "still served")
	}
	wantProvider(t, mustDial(t, &Dialer{}, l.Addr().String()), fakeName)
}

// A huge Backlog is cut to the largest that there is.
func TestListenerBacklogHasALimit(t *testing.T) {
	f := useFake(t)
	mustListen(t, &ListenConfig{Backlog: math.MaxInt}, "tcp", "127.0.0.1:0")
	if got := f.listened.backlog; got != maxBacklog {
		t.Errorf("the provider has a backlog of %d, want %d", got, maxBacklog)
	}
}

// A connection that is never negotiated loses its place in the backlog.
func TestFailedNegotiationGivesItsPlaceBack(t *testing.T) {
	f := useFake(t)
	l := mustListen(t, &ListenConfig{Backlog: 1}, "tcp", "127.0.0.1:0")
	f.silent.Store(true)
	d := &Dialer{Policy: Require}
	d.Options.AttemptTimeout = 10 * time.Millisecond
	if _, err := d.Dial("tcp", l.Addr().String()); reasonOf(err) != ReasonTimeout {
		t.Fatalf("a dialer that says nothing: %v", err)
	}
	f.silent.Store(false)
	testenv.Eventually(t, patience, func() error {
		c, err := (&Dialer{Policy: Require}).Dial("tcp", l.Addr().String())
		if err == nil {
			wantProvider(t, c, fakeName)
			c.Close()
		}
		return err
	})
}

// Dialers that connect and say nothing do not keep others out of the backlog until their
// time is up.
func TestBacklogOfTheSilentIsGivenToOthers(t *testing.T) {
	f := useFake(t)
	const places = 2
	l := mustListen(t, &ListenConfig{Backlog: places}, "tcp", "127.0.0.1:0")
	f.silent.Store(true)
	ctx, cancel := context.WithCancel(t.Context())
	var silent sync.WaitGroup
	defer silent.Wait()
	defer cancel()
	for range places {
		silent.Go(func() {
			d := &Dialer{Policy: Require}
			d.Options.AttemptTimeout = 2 * patience // longer than negotiateTimeout
			d.DialContext(ctx, "tcp", l.Addr().String())
		})
		<-f.connected
	}
	f.silent.Store(false)
	began := time.Now()
	for range places {
		testenv.Eventually(t, patience, func() error {
			c, err := (&Dialer{Policy: Require}).Dial("tcp", l.Addr().String())
			if err == nil {
				wantProvider(t, c, fakeName)
				t.Cleanup(func() { c.Close() })
			}
			return err
		})
	}
	if took := time.Since(began); took < backlog.Slow/2 || took > negotiateTimeout/2 {
		t.Errorf("it took %v", took)
	}
	// Who has negotiated keeps its place.
	if _, err := (&Dialer{Policy: Require}).Dial("tcp", l.Addr().String()); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("beyond the backlog: %v", err)
	}
	for range places {
		wantProvider(t, mustAccept(t, l), fakeName)
	}
}

// A TCP connection that the listener has taken but nobody accepts is reset at Close, as
// those in the kernel's backlog are: an orderly end would look like an answer.
func TestListenerResetsWhatNobodyAccepts(t *testing.T) {
	useFake(t)
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	var conns []net.Conn
	for range 3 { // accepted, taken, in the kernel's backlog
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		conns = append(conns, c)
	}
	wantProvider(t, mustAccept(t, l), "tcp")
	l.Close()
	for _, c := range conns[1:] {
		c.SetDeadline(time.Now().Add(patience))
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("Read: %v", err)
		}
	}
}

func TestListenerRequireResetsPlainTCP(t *testing.T) {
	useFake(t)
	l := mustListen(t, &ListenConfig{Policy: Require}, "tcp", "127.0.0.1:0")
	accepted := make(chan net.Conn)
	go func() {
		c, _ := l.Accept()
		accepted <- c
	}()
	p, err := net.Dial("tcp", l.Addr().String())
	if err == nil { // else the reset was faster than the dialer
		defer p.Close()
		p.SetDeadline(time.Now().Add(patience))
		_, err = p.Read(make([]byte, 1))
	}
	if !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("a plain client read %v, want a reset", err)
	}
	mustDial(t, &Dialer{Policy: Require}, l.Addr().String())
	c := <-accepted
	wantProvider(t, c, fakeName)
	c.Close()
}

func TestAcceptAfterDeadlineAndClose(t *testing.T) {
	useFake(t)
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	l.SetDeadline(time.Now().Add(time.Millisecond))
	_, err := l.Accept()
	oe := wantOpError(t, err, "accept", os.ErrDeadlineExceeded)
	if !oe.Timeout() || oe.Addr.String() != l.Addr().String() {
		t.Errorf("%+v", oe)
	}

	mustDial(t, &Dialer{}, l.Addr().String()) // ready, and yet:
	l.SetDeadline(time.Now().Add(-1))
	_, err = l.Accept()
	wantOpError(t, err, "accept", os.ErrDeadlineExceeded)
	l.SetDeadline(time.Time{})
	mustAccept(t, l)

	const waiters = 4
	errs := make(chan error, waiters)
	for range waiters {
		go func() {
			_, err := l.Accept()
			errs <- err
		}()
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	for range waiters {
		wantOpError(t, <-errs, "accept", net.ErrClosed)
	}
	_, err = l.Accept()
	wantOpError(t, err, "accept", net.ErrClosed)

	late := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	late.SetDeadline(time.Now().Add(-1))
	late.Close()
	for range 20 { // not the one or the other
		_, err = late.Accept()
		wantOpError(t, err, "accept", net.ErrClosed)
	}
	wantOpError(t, l.Close(), "close", net.ErrClosed)
	wantOpError(t, l.SetDeadline(time.Now()), "set", net.ErrClosed)
	if _, err := new(Dialer).Dial("tcp", l.Addr().String()); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("dial after Close: %v", err)
	}
}

// TCP's listener fails while nobody is in Accept, as for lack of descriptors. The error is
// forgotten when the next connection comes.
func TestAcceptSaysNothingOfWhatIsOver(t *testing.T) {
	useFake(t)
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	plain := &Dialer{Policy: Never}
	mustDial(t, plain, l.Addr().String())
	wantFallback(t, mustAccept(t, l), ReasonPeerPlain)
	l.tcp.SetDeadline(time.Now().Add(-1))
	l.tcp.Accept() // comes after the listener's own call, which has failed then
	l.tcp.SetDeadline(time.Time{})
	mustDial(t, plain, l.Addr().String())
	wantFallback(t, mustAccept(t, l), ReasonPeerPlain)

	l.tcp.SetDeadline(time.Now().Add(-1)) // what is not over is said
	_, err := l.Accept()
	wantOpError(t, err, "accept", os.ErrDeadlineExceeded)
}

// What nobody accepted is reset; what was accepted lives on.
func TestListenerCloseResetsWhatWaits(t *testing.T) {
	useFake(t)
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	kept := mustDial(t, &Dialer{}, l.Addr().String())
	s := mustAccept(t, l)
	lost := mustDial(t, &Dialer{}, l.Addr().String())
	l.Close()
	lost.SetDeadline(time.Now().Add(patience))
	if _, err := lost.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("read %v, want a reset", err)
	}
	say(t, kept, s, "alive")
}

func TestListenerFileAndSyscallConn(t *testing.T) {
	useFake(t)
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	file, err := l.File()
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	child, err := net.FileListener(file)
	if err != nil {
		t.Fatal(err)
	}
	defer child.Close()
	// The one that never called Accept takes nothing from the other.
	for _, d := range []*Dialer{{Policy: Never}, {}} {
		p := mustDial(t, d, l.Addr().String())
		wantProvider(t, p, providerTCP)
		say(t, p, mustAccept(t, child), "to the heir")
	}
	if _, err := (&Dialer{Policy: Require}).Dial("tcp", l.Addr().String()); reasonOf(err) != ReasonNoListener {
		t.Errorf("with a SAN required: %v, want %v", err, ReasonNoListener)
	}

	raw, err := l.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := raw.Control(func(fd uintptr) {
		if ok, err := isListening(fd); !ok || err != nil {
			t.Errorf("the socket does not listen: %v", err)
		}
	}); err != nil {
		t.Error(err)
	}
}

func TestListenerOpensAndClosesUnderLoad(t *testing.T) {
	useFake(t)
	for range 20 {
		l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
		var wg sync.WaitGroup
		for i := range 8 {
			wg.Go(func() {
				d := &Dialer{Policy: []Policy{Prefer, Never}[i%2]}
				if c, err := d.Dial("tcp", l.Addr().String()); err == nil {
					c.Close()
				}
			})
		}
		wg.Go(func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				c.Close()
			}
		})
		l.Close()
		wg.Wait()
	}
	waitFor(t, "all connections closed", func() bool { return Stats().Open[fakeName] == 0 })
}

// taken is a provider for which the first ports are taken.
type taken struct {
	*fake
	ports []int // those that it was asked for
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
// asked for is not replaced.
func TestPortTakenOnTheSANSide(t *testing.T) {
	for _, tt := range []struct {
		taken, asked int
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
		if ok := err == nil; ok != tt.ok || len(p.ports) != tt.asked {
			t.Errorf("%+v: Listen: %v; asked for the ports %v", tt, err, p.ports)
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
func TestListenerSaysWhatItLacks(t *testing.T) {
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

// A provider is told that a listener takes no IPv4, whether the network or the TCP socket
// says so.
func TestListenerOfIPv6AloneIsSaid(t *testing.T) {
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
			t.Errorf("%s: TCP says IPv6 alone: %v, want %v", network, got, alone)
		}
		l.Close()
	}
}
