package san

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

func TestDialPeerThatNeverNegotiates(t *testing.T) {
	f := useFake(t)
	f.unnegotiated = true
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	d := &Dialer{}
	d.Options.AttemptTimeout = 10 * time.Millisecond
	c := mustDial(t, d, l.Addr().String())
	wantFallback(t, c, ReasonTimeout)
	send(t, c, mustAccept(t, l), "by TCP then")
}

// second is a provider beside the fake.
type second struct{ *fake }

func (second) name() string { return "second" }

// Where several providers fail, the reason is the preferred one's.
func TestDialReasonIsThePreferredProviders(t *testing.T) {
	fails := func(r Reason) *fake {
		return &fake{fail: func(context.Context, request) error { return &Unavailable{Reason: r} }}
	}
	useProviders(t, fails(ReasonPermission), second{fails(ReasonResources)})
	addr := plainListen(t, "127.0.0.1:0").Addr().String()
	wantFallback(t, mustDial(t, &Dialer{}, addr), ReasonPermission)
	wantFallback(t, mustDial(t, &Dialer{Providers: []string{"second", fakeName}}, addr), ReasonResources)
}

// An attempt that fails leaves no socket behind.
func TestDialInVainLeavesNoSocket(t *testing.T) {
	f := useFake(t)
	f.unnegotiated = true
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	d := &Dialer{Policy: Require}
	d.Options.AttemptTimeout = time.Millisecond
	before := countDescriptors(t)
	for range 10 {
		if _, err := d.Dial("tcp", l.Addr().String()); reasonOf(err) != ReasonTimeout {
			t.Fatalf("a peer that never negotiates: %v", err)
		}
	}
	if n := countDescriptors(t); n > before {
		t.Errorf("%d descriptors, were %d", n, before)
	}
}

// Nor does one over shared memory that finds no listener of ours.
func TestDialOfAPlainListenerLeavesNoSocket(t *testing.T) {
	useProviders(t, shmProvider{})
	addr := plainListen(t, "127.0.0.1:0").Addr().String()
	before := countDescriptors(t)
	for range 10 {
		if _, err := (&Dialer{Policy: Require}).Dial("tcp", addr); reasonOf(err) != ReasonNoListener {
			t.Fatalf("a plain listener: %v", err)
		}
	}
	if n := countDescriptors(t); n > before {
		t.Errorf("%d descriptors, were %d", n, before)
	}
}

func TestDialSeveralAddresses(t *testing.T) {
	f := useFake(t)
	dead := netip.MustParseAddrPort("127.0.0.2:" + portOf(freePort(t)))
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:"+fmt.Sprint(dead.Port()))
	f.fail = func(_ context.Context, r request) error {
		if r.remote == dead {
			return syscall.ECONNREFUSED
		}
		return nil
	}
	d := &Dialer{}
	d.NetDialer.Resolver = answering(t, map[string][]string{"two.test.": {"127.0.0.2", "127.0.0.1"}})
	c := mustDial(t, d, net.JoinHostPort("two.test", fmt.Sprint(dead.Port())))
	wantProvider(t, c, fakeName)
	if got := c.RemoteAddr().String(); got != l.Addr().String() {
		t.Errorf("connected to %s", got)
	}
}

// slowFake is a provider whose network takes long to answer.
type slowFake struct{ *fake }

func (slowFake) slow(netip.Addr, settings) time.Duration { return 4 * defaultAttemptTimeout }

// A network whose subnet manager is slow has more time by default, but not more than the
// program gives.
func TestDialOverASlowNetwork(t *testing.T) {
	var had time.Duration
	f := &fake{fail: func(ctx context.Context, _ request) error {
		end, _ := ctx.Deadline()
		had = time.Until(end)
		return &Unavailable{Reason: ReasonNoListener}
	}}
	useProviders(t, slowFake{f})
	addr := plainListen(t, "127.0.0.1:0").Addr().String()
	mustDial(t, &Dialer{}, addr)
	if had < 2*defaultAttemptTimeout {
		t.Errorf("an attempt had %v, want %v", had, 4*defaultAttemptTimeout)
	}
	d := &Dialer{}
	d.Options.AttemptTimeout = minSilence
	if mustDial(t, d, addr); had > minSilence {
		t.Errorf("an attempt had %v, want %v", had, minSilence)
	}
}

// Where a SAN serves an address, the families have their turns. A first one that is silent
// takes AttemptTimeout.
func TestDialFamiliesInTurn(t *testing.T) {
	f := useFake(t)
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	var tried []netip.Addr
	f.fail = func(ctx context.Context, r request) error {
		tried = append(tried, r.remote.Addr())
		if r.remote.Addr().Is4() {
			return nil
		}
		<-ctx.Done()
		return ctx.Err()
	}
	d := bothFamilies(t, Require)
	d.Options.AttemptTimeout = minSilence
	address := net.JoinHostPort("both.test", portOf(l.Addr().String()))
	c := mustDial(t, d, address)
	wantProvider(t, c, fakeName)
	if want := []netip.Addr{netip.IPv6Loopback(), netip.MustParseAddr("127.0.0.1")}; !slices.Equal(tried, want) {
		t.Errorf("tried %v, want %v", tried, want)
	}
	send(t, c, mustAccept(t, l), "by the second")

	// When both fail, the error is the first's.
	f.fail = func(_ context.Context, r request) error {
		if r.remote.Addr().Is4() {
			return &Unavailable{Reason: ReasonVersion}
		}
		return &Unavailable{Reason: ReasonOwner}
	}
	if _, err := d.Dial("tcp", address); reasonOf(err) != ReasonOwner {
		t.Errorf("both in vain: %v", err)
	}
}

// While the other family waits, TCP's attempt at an address is bounded, unless the dialer
// wants its addresses in turn in any case.
func TestDialBoundsTCPOfTheFirstFamily(t *testing.T) {
	f := useFake(t)
	f.fail = func(context.Context, request) error { return &Unavailable{Reason: ReasonNoListener} }
	l := plainListen(t, "127.0.0.1:0")
	address := net.JoinHostPort("both.test", portOf(l.Addr().String()))
	for _, tt := range []struct {
		delay time.Duration
		first time.Duration // the most time that TCP has at the first address
	}{{0, familyTimeout}, {-1, testTimeout / 2}} {
		left := make(map[string]time.Duration) // by network
		d := bothFamilies(t, Prefer)
		d.NetDialer.FallbackDelay = tt.delay
		d.NetDialer.ControlContext = func(ctx context.Context, network, _ string, _ syscall.RawConn) error {
			at, _ := ctx.Deadline()
			left[network] = time.Until(at)
			if network == "tcp6" {
				return syscall.ETIMEDOUT
			}
			return nil
		}
		c := mustDial(t, d, address)
		wantFallback(t, c, ReasonNoListener)
		send(t, c, mustAccept(t, l), "by the second")
		if got := left["tcp6"]; got > tt.first || got < tt.first/2 {
			t.Errorf("FallbackDelay %v: TCP had %v at the first address, want %v", tt.delay, got, tt.first)
		}
		if got := left["tcp4"]; got < testTimeout/2 {
			t.Errorf("FallbackDelay %v: TCP had %v at the last address, want all that is left", tt.delay, got)
		}
	}
}

// Several addresses share the time that there is, as with net: each gets at least two
// seconds, and the last all that is left.
func TestAddressesShareTheTime(t *testing.T) {
	for _, c := range []struct {
		left       int
		have, want time.Duration
	}{
		{3, 30 * time.Second, 10 * time.Second},
		{3, 3 * time.Second, 2 * time.Second},
		{3, time.Second, time.Second},
		{1, 30 * time.Second, 30 * time.Second},
		{3, 0, 0}, // no limit
	} {
		synctest.Test(t, func(t *testing.T) {
			ctx := t.Context()
			if c.have > 0 {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, c.have)
				defer cancel()
			}
			ctx, cancel := share(ctx, c.left)
			defer cancel()
			got := time.Duration(0)
			if at, ok := ctx.Deadline(); ok {
				got = time.Until(at)
			}
			if got != c.want {
				t.Errorf("one of %d addresses has %v of %v, want %v", c.left, got, c.have, c.want)
			}
		})
	}
}
