package san

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sanconn/san/internal/testenv"
)

// What a provider answers, and how the dial ends (C4). There is a TCP listener in each
// case.
func TestDialFallsBackUnlessTCPWouldFailToo(t *testing.T) {
	for _, c := range []struct {
		name   string
		answer error
		reason Reason        // of the fallback
		final  syscall.Errno // or the error that stays
	}{
		{name: "no SAN listener", answer: &Unavailable{Reason: ReasonNoListener}, reason: ReasonNoListener},
		{name: "another version", answer: &Unavailable{Reason: ReasonVersion}, reason: ReasonVersion},
		{name: "another owner", answer: fmt.Errorf("shm: %w", &Unavailable{Reason: ReasonOwner}), reason: ReasonOwner},
		{name: "time-out", answer: os.NewSyscallError("connect", syscall.ETIMEDOUT), reason: ReasonTimeout},
		{name: "no route over the SAN", answer: syscall.ENETUNREACH, reason: ReasonUnreachable},
		{name: "not permitted", answer: os.NewSyscallError("socket", syscall.EACCES), reason: ReasonPermission},
		{name: "out of descriptors", answer: os.NewSyscallError("socket", syscall.EMFILE), reason: ReasonResources},
		{name: "out of memory", answer: syscall.ENOMEM, reason: ReasonResources},
		{name: "nonsense", answer: errors.New("magic 0x1234"), reason: ReasonProtocol},
		{name: "refused", answer: os.NewSyscallError("connect", syscall.ECONNREFUSED), final: syscall.ECONNREFUSED},
		{name: "host unreachable", answer: syscall.EHOSTUNREACH, final: syscall.EHOSTUNREACH},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := useFake(t)
			f.fail = func(context.Context, request) error { return c.answer }
			addr := plainListen(t, "127.0.0.1:0").Addr().String()

			before := Stats()
			conn, err := new(Dialer).Dial("tcp", addr)
			if c.final != 0 {
				oe := wantOpError(t, err, "dial", c.final)
				if oe.Addr == nil || oe.Addr.String() != addr {
					t.Errorf("the error names %v, want %s", oe.Addr, addr)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			wantFallback(t, conn, c.reason)
			after := Stats()
			if n := after.Fallbacks[c.reason] - before.Fallbacks[c.reason]; n != 1 {
				t.Errorf("counted %d times", n)
			}
			if n := after.Dialed["tcp"] - before.Dialed["tcp"]; n != 1 {
				t.Errorf("%d TCP connections counted", n)
			}

			_, err = (&Dialer{Policy: Require}).Dial("tcp", addr)
			wantOpError(t, err, "dial", err)
			if why := (*Unavailable)(nil); errors.As(err, &why) && why.Reason != c.reason {
				t.Errorf("with Require the reason is %v: %v", why.Reason, err)
			} else if !strings.Contains(err.Error(), "no SAN connection") {
				t.Errorf("with Require the error is %v", err)
			}
		})
	}
}

func TestDialPolicyNeverAsksNobody(t *testing.T) {
	f := useFake(t)
	c := mustDial(t, &Dialer{Policy: Never}, plainListen(t, "127.0.0.1:0").Addr().String())
	wantFallback(t, c, ReasonPolicy)
	if f.tried() != 0 {
		t.Error("the provider was asked")
	}
}

// The deprecated channel works as with net.Dialer.
func TestDialCancelChannel(t *testing.T) {
	f := useFake(t)
	begun := make(chan struct{})
	f.fail = func(ctx context.Context, _ request) error {
		close(begun)
		<-ctx.Done()
		return ctx.Err()
	}
	addr := plainListen(t, "127.0.0.1:0").Addr().String()
	cancel := make(chan struct{})
	go func() {
		<-begun
		close(cancel)
	}()
	//lint:ignore SA1019 what this test is about
	d := &Dialer{Policy: Require, NetDialer: net.Dialer{Cancel: cancel, Timeout: patience}}
	began := time.Now()
	_, err := d.Dial("tcp", addr)
	if err == nil || !strings.Contains(err.Error(), "operation was canceled") {
		t.Errorf("error %v", err)
	}
	if took := time.Since(began); took > patience/2 {
		t.Errorf("it took %v", took)
	}
}

func TestDialOtherNetworksGoToNet(t *testing.T) {
	useFake(t)
	path := t.TempDir() + "/socket"
	l, err := Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	before := Stats().Fallbacks[ReasonNetwork]
	c, err := Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if info := InfoOf(c); info.Provider != "unix" {
		t.Errorf("provider %q", info.Provider)
	}
	if n := Stats().Fallbacks[ReasonNetwork] - before; n != 1 {
		t.Errorf("counted %d times", n)
	}
	var why *Unavailable
	if _, err := (&Dialer{Policy: Require}).Dial("unix", path); !errors.As(err, &why) || why.Reason != ReasonNetwork {
		t.Errorf("Dial with Require: %v", err)
	}
	if _, err := (&ListenConfig{Policy: Require}).Listen(context.Background(), "unix", path+"2"); !errors.As(err, &why) || why.Reason != ReasonNetwork {
		t.Errorf("Listen with Require: %v", err)
	}
}

func TestDialBadInputIsTheErrorOfNet(t *testing.T) {
	useFake(t)
	free := freePort(t)
	for _, c := range []struct{ name, network, address string }{
		{"unknown network", "tcp5", "127.0.0.1:1"},
		{"no port", "tcp", "127.0.0.1"},
		{"bad port", "tcp", "127.0.0.1:http2000"},
		{"port out of range", "tcp", "127.0.0.1:65536"},
		{"unknown host", "tcp", "no-such-host.invalid:80"},
		{"family without address", "tcp6", "127.0.0.1:80"},
		{"nobody listens", "tcp", free},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			_, want := new(net.Dialer).DialContext(ctx, c.network, c.address)
			_, got := new(Dialer).DialContext(ctx, c.network, c.address)
			if want == nil || got == nil || got.Error() != want.Error() {
				t.Errorf("got  %v\nwant %v", got, want)
			}
			if _, err := (&Dialer{Policy: Require}).DialContext(ctx, c.network, c.address); err == nil {
				t.Error("no error with Require")
			}
		})
	}
	if _, err := (&Dialer{Providers: []string{"warp"}}).Dial("tcp", free); err == nil || !strings.Contains(err.Error(), `unknown provider "warp"`) {
		t.Errorf("unknown provider: %v", err)
	}
}

// freePort is an address of this host where nobody listens.
func freePort(t testing.TB) string {
	t.Helper()
	l := plainListen(t, "127.0.0.1:0")
	l.Close()
	return l.Addr().String()
}

func TestDialSilentSANCostsOneDelay(t *testing.T) {
	f := useFake(t)
	f.fail = func(ctx context.Context, _ request) error {
		<-ctx.Done()
		return ctx.Err()
	}
	addr := plainListen(t, "127.0.0.1:0").Addr().String()
	d := &Dialer{}
	d.Options.AttemptTimeout = minSilence
	wantFallback(t, mustDial(t, d, addr), ReasonTimeout)
	wantFallback(t, mustDial(t, d, addr), ReasonRemembered)
	if n := f.tried(); n != 1 {
		t.Errorf("the provider was asked %d times", n)
	}

	other := plainListen(t, "127.0.0.1:0").Addr().String()
	wantFallback(t, mustDial(t, d, other), ReasonTimeout)

	r := &Dialer{Policy: Require, Options: d.Options}
	_, err := r.Dial("tcp", addr)
	if ne, ok := err.(net.Error); !ok || !ne.Timeout() {
		t.Errorf("with Require: %v, want a time-out", err)
	}
	if n := f.tried(); n != 3 {
		t.Errorf("Require was answered from memory (%d attempts)", n)
	}
}

func TestDialPeerThatNeverNegotiates(t *testing.T) {
	f := useFake(t)
	f.mute = true
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	d := &Dialer{}
	d.Options.AttemptTimeout = 10 * time.Millisecond
	c := mustDial(t, d, l.Addr().String())
	wantFallback(t, c, ReasonTimeout)
	say(t, c, mustAccept(t, l), "by TCP then")
}

// second is a provider beside the fake.
type second struct{ *fake }

func (second) name() string { return "second" }

// Where several providers fail, the reason is the preferred one's.
func TestDialReasonIsThePreferredProviders(t *testing.T) {
	say := func(r Reason) *fake {
		return &fake{fail: func(context.Context, request) error { return &Unavailable{Reason: r} }}
	}
	useProviders(t, say(ReasonPermission), second{say(ReasonResources)})
	addr := plainListen(t, "127.0.0.1:0").Addr().String()
	wantFallback(t, mustDial(t, &Dialer{}, addr), ReasonPermission)
	wantFallback(t, mustDial(t, &Dialer{Providers: []string{"second", fakeName}}, addr), ReasonResources)
}

// An attempt that fails leaves no socket behind.
func TestDialInVainLeavesNoSocket(t *testing.T) {
	f := useFake(t)
	f.mute = true
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

// A destination that answers is tried again at once, whatever it did before.
func TestDialSuccessIsRemembered(t *testing.T) {
	f := useFake(t)
	f.fail = func(ctx context.Context, _ request) error {
		<-ctx.Done()
		return ctx.Err()
	}
	addr := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0").Addr().String()
	d := &Dialer{}
	d.Options.AttemptTimeout = minSilence
	wantFallback(t, mustDial(t, d, addr), ReasonTimeout)
	f.fail = nil
	wantFallback(t, mustDial(t, &Dialer{}, addr), ReasonRemembered)
	wantProvider(t, mustDial(t, &Dialer{Policy: Require}, addr), fakeName) // which asks all the same
	wantProvider(t, mustDial(t, &Dialer{}, addr), fakeName)
}

// A dialer with little time leaves half of it to TCP. If its wait was long enough to prove
// anything, its next dial does not wait again.
func TestDialSilentSANLeavesTimeForTCP(t *testing.T) {
	f := useFake(t)
	f.fail = func(ctx context.Context, _ request) error {
		<-ctx.Done()
		return ctx.Err()
	}
	addr := plainListen(t, "127.0.0.1:0").Addr().String()
	var d Dialer
	d.Options.AttemptTimeout = minSilence - time.Millisecond
	for range 2 {
		wantFallback(t, mustDial(t, &d, addr), ReasonTimeout)
	}
	if n := f.tried(); n != 2 {
		t.Errorf("%d attempts: a moment without an answer was taken for silence", n)
	}
	d.Options.AttemptTimeout = patience
	d.NetDialer.Timeout = 10 * minSilence // half of it for TCP
	wantFallback(t, mustDial(t, &d, addr), ReasonTimeout)
	wantFallback(t, mustDial(t, &d, addr), ReasonRemembered)

	// Others may have another way there.
	d.RDMA.IWARPOffset = 1
	wantFallback(t, mustDial(t, &d, addr), ReasonTimeout)
	d.NetDialer.LocalAddr = &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)}
	wantFallback(t, mustDial(t, &d, addr), ReasonTimeout)
}

// Any answer ends the consequences of silence.
func TestDialAnswerIsRemembered(t *testing.T) {
	f := useFake(t)
	addr := plainListen(t, "127.0.0.1:0").Addr().String()
	key := attemptKey{provider: fakeName, dst: netip.MustParseAddrPort(addr)}
	dialBackoff.silent = map[attemptKey]silence{key: {until: time.Now(), span: backoffMost}}
	wantFallback(t, mustDial(t, &Dialer{}, addr), ReasonNoListener)
	if _, still := dialBackoff.silent[key]; still {
		t.Error("the next silence costs as long as if there had been no answer")
	}
	if f.tried() != 1 {
		t.Errorf("%d attempts", f.tried())
	}
}

func TestDialOwnImpatienceIsNotRemembered(t *testing.T) {
	f := useFake(t)
	f.fail = func(ctx context.Context, _ request) error {
		<-ctx.Done()
		return ctx.Err()
	}
	addr := plainListen(t, "127.0.0.1:0").Addr().String()
	for _, c := range []struct {
		name    string
		dialer  net.Dialer
		context func() (context.Context, context.CancelFunc)
		target  error
		timeout bool
	}{
		{name: "Timeout", dialer: net.Dialer{Timeout: time.Millisecond}, target: context.DeadlineExceeded, timeout: true},
		{name: "Deadline", dialer: net.Dialer{Deadline: time.Now().Add(time.Millisecond)}, target: context.DeadlineExceeded, timeout: true},
		{name: "context's deadline", context: func() (context.Context, context.CancelFunc) {
			return context.WithTimeout(context.Background(), time.Millisecond)
		}, target: context.DeadlineExceeded, timeout: true},
		{name: "cancelled", context: func() (context.Context, context.CancelFunc) {
			ctx, cancel := context.WithCancel(context.Background())
			cancel()
			return ctx, cancel
		}, target: context.Canceled},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctx, cancel := context.Background(), context.CancelFunc(func() {})
			if c.context != nil {
				ctx, cancel = c.context()
			}
			defer cancel()
			d := &Dialer{NetDialer: c.dialer, Policy: Require}
			d.Options.AttemptTimeout = patience
			_, err := d.DialContext(ctx, "tcp", addr)
			if oe := wantOpError(t, err, "dial", c.target); oe.Timeout() != c.timeout {
				t.Errorf("Timeout() is %v: %v", oe.Timeout(), err)
			}
		})
	}
	f.fail = nil
	wantFallback(t, mustDial(t, &Dialer{}, addr), ReasonNoListener)
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

// aloof is a provider that serves some addresses only.
type aloof struct {
	*fake
	to netip.Addr
}

func (p aloof) serves(dst netip.Addr, _ settings) error {
	if p.to == dst {
		return nil
	}
	return fmt.Errorf("it serves %v alone", p.to)
}

// With the policy Require, the error for an address that no SAN serves says why not.
func TestRequireNamesWhatIsNotServed(t *testing.T) {
	f := useFake(t)
	one, two := netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("127.0.0.2")
	useProviders(t, aloof{f, one}, f, aloof{f, two})
	d := &Dialer{Policy: Require, NetDialer: net.Dialer{Timeout: patience}}
	_, err := d.Dial("tcp", "192.0.2.1:80")
	var op *net.OpError
	if !errors.As(err, &op) || op.Addr == nil || op.Addr.String() != "192.0.2.1:80" || reasonOf(err) != ReasonNotServed {
		t.Errorf("%v, want the address and the reason", err)
	}
	if want := "it serves 127.0.0.1 alone; it serves loopback alone; it serves 127.0.0.2 alone"; !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want %q in it", err, want)
	}
	// A provider that would serve it may be out of question for another reason.
	d.NetDialer.LocalAddr = &net.TCPAddr{IP: net.IPv6loopback}
	if _, err = d.Dial("tcp", "127.0.0.1:80"); reasonOf(err) != ReasonNotServed {
		t.Errorf("from another family: %v", err)
	}
}

// A name is looked up once, whether a SAN serves it or not.
func TestDialAsksTheResolverOnce(t *testing.T) {
	f := useFake(t)
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	for _, c := range []struct {
		name     string
		provider provider
		want     Reason
	}{
		{"by a SAN", f, ReasonNone},
		{"not served", aloof{f, netip.Addr{}}, ReasonNotServed},
	} {
		t.Run(c.name, func(t *testing.T) {
			useProviders(t, c.provider)
			var asked atomic.Int32
			r := answering(t, map[string][]string{"one.test.": {"127.0.0.1"}})
			pipe := r.Dial
			r.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
				asked.Add(1) // each question has a connection of its own
				return pipe(ctx, network, address)
			}
			conn, err := (&Dialer{NetDialer: net.Dialer{Resolver: r, Timeout: patience}}).Dial("tcp4", net.JoinHostPort("one.test", portOf(l.Addr().String())))
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if why := InfoOf(conn).Fallback; why != c.want {
				t.Errorf("reason %v, want %v", why, c.want)
			}
			if n := asked.Load(); n != 1 {
				t.Errorf("the resolver was asked %d times", n)
			}
		})
	}
}

// bothFamilies returns a dialer that knows both.test by ::1 and then 127.0.0.1, which is
// also the order in which net sorts them.
func bothFamilies(t *testing.T, policy Policy) *Dialer {
	r := answering(t, map[string][]string{"both.test.": {"::1", "127.0.0.1"}})
	return &Dialer{Policy: policy, NetDialer: net.Dialer{Resolver: r, Timeout: patience}}
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
	say(t, c, mustAccept(t, l), "by the second")

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
	}{{0, familyTimeout}, {-1, patience / 2}} {
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
		say(t, c, mustAccept(t, l), "by the second")
		if got := left["tcp6"]; got > tt.first || got < tt.first/2 {
			t.Errorf("FallbackDelay %v: TCP had %v at the first address, want %v", tt.delay, got, tt.first)
		}
		if got := left["tcp4"]; got < patience/2 {
			t.Errorf("FallbackDelay %v: TCP had %v at the last address, want all that is left", tt.delay, got)
		}
	}
}

// Where no SAN serves any of the addresses, net tries the families in parallel.
func TestDialLeavesTheFamiliesToNet(t *testing.T) {
	useProviders(t, aloof{useFake(t), netip.Addr{}})
	l := plainListen(t, "127.0.0.1:0")
	left := make(chan error, 1)
	d := bothFamilies(t, Prefer)
	d.NetDialer.FallbackDelay = time.Millisecond
	d.NetDialer.ControlContext = func(ctx context.Context, network, _ string, _ syscall.RawConn) error {
		if network == "tcp4" {
			return nil
		}
		<-ctx.Done()
		left <- ctx.Err()
		return ctx.Err()
	}
	c := mustDial(t, d, net.JoinHostPort("both.test", portOf(l.Addr().String())))
	wantFallback(t, c, ReasonNotServed)
	say(t, c, mustAccept(t, l), "by the faster")
	select {
	case err := <-left:
		if err != context.Canceled {
			t.Errorf("the attempt at the first address ended by %v, not because another one won", err)
		}
	case <-time.After(patience):
		t.Error("the first address was not tried")
	}
}

// A failure at this end proves nothing about the destination.
func TestDialOwnFailureIsNoAnswer(t *testing.T) {
	f := useFake(t)
	addr := plainListen(t, "127.0.0.1:0").Addr().String()
	key := attemptKey{provider: fakeName, dst: netip.MustParseAddrPort(addr)}
	for _, err := range []error{syscall.EMFILE, hookError{syscall.ECONNREFUSED}, &Unavailable{Reason: ReasonNotServed}} {
		f.fail = func(context.Context, request) error { return err }
		dialBackoff.silent = map[attemptKey]silence{key: {until: time.Now(), span: backoffMost}}
		if c, err := new(Dialer).Dial("tcp", addr); err == nil {
			c.Close()
		}
		if dialBackoff.silent[key].span != backoffMost {
			t.Errorf("%v was taken for an answer", err)
		}
	}
}

// Addresses that LocalAddr does not reach are left out, as net does it; where the
// policy is Require, those that no SAN serves are.
func TestDialLeavesOutWhatCannotBe(t *testing.T) {
	f := useFake(t)
	var mu sync.Mutex
	var asked []netip.Addr
	f.fail = func(_ context.Context, r request) error {
		mu.Lock()
		defer mu.Unlock()
		asked = append(asked, r.remote.Addr())
		return syscall.ECONNREFUSED
	}
	r := answering(t, map[string][]string{"both.test.": {"::1", "127.0.0.1"}, "two.test.": {"127.0.0.2", "127.0.0.1"}})
	v4 := netip.MustParseAddr("127.0.0.1")

	d := &Dialer{NetDialer: net.Dialer{Resolver: r, Timeout: patience, LocalAddr: &net.TCPAddr{IP: v4.AsSlice()}}}
	_, err := d.Dial("tcp", "both.test:1")
	wantOpError(t, err, "dial", syscall.ECONNREFUSED)
	if !slices.Equal(asked, []netip.Addr{v4}) {
		t.Errorf("asked for %v", asked)
	}
	_, want := (&net.Dialer{LocalAddr: d.NetDialer.LocalAddr}).Dial("tcp", "[::1]:1")
	if _, err := d.Dial("tcp", "[::1]:1"); err == nil || want == nil || err.Error() != want.Error() {
		t.Errorf("got  %v\nwant %v", err, want)
	}

	useProviders(t, aloof{f, v4})
	f.fail = func(context.Context, request) error { return &Unavailable{Reason: ReasonVersion} }
	d = &Dialer{Policy: Require, NetDialer: net.Dialer{Resolver: r, Timeout: patience}}
	if _, err := d.Dial("tcp", "two.test:1"); reasonOf(err) != ReasonVersion {
		t.Errorf("with Require: %v", err)
	}
}

func TestDialHooksSeeTheSocketOfTheAddress(t *testing.T) {
	useFake(t)
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	var calls atomic.Int32
	d := &Dialer{}
	d.NetDialer.ControlContext = func(_ context.Context, network, address string, c syscall.RawConn) error {
		calls.Add(1)
		if network != "tcp4" || address != l.Addr().String() {
			t.Errorf("hook for %s %s", network, address)
		}
		return c.Control(func(fd uintptr) {
			if err := setReuseAddr(fd); err != nil {
				t.Error(err)
			}
		})
	}
	c := mustDial(t, d, l.Addr().String())
	wantProvider(t, c, fakeName)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := d.DialContext(ctx, "tcp", l.Addr().String())
	wantOpError(t, err, "dial", context.Canceled)
	if calls.Load() != 1 { // not for a dial that is over
		t.Errorf("hook called %d times", calls.Load())
	}
	var port int // to which a hook binds the socket itself
	d.NetDialer.ControlContext = func(_ context.Context, _, _ string, c syscall.RawConn) error {
		return c.Control(func(fd uintptr) {
			if err := syscall.Bind(int(fd), &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
				t.Error(err)
			}
			if sa, err := syscall.Getsockname(int(fd)); err == nil {
				port = sa.(*syscall.SockaddrInet4).Port
			}
		})
	}
	c = mustDial(t, d, l.Addr().String())
	wantProvider(t, c, fakeName)
	if got := c.LocalAddr().(*net.TCPAddr).Port; got != port {
		t.Errorf("the connection comes from port %d, the hook chose %d", got, port)
	}
	d.NetDialer.ControlContext = nil
	d.NetDialer.Control = func(string, string, syscall.RawConn) error { return syscall.EXDEV }
	_, err = d.Dial("tcp", l.Addr().String())
	wantOpError(t, err, "dial", syscall.EXDEV)
}

func TestDialLocalAddr(t *testing.T) {
	useFake(t)
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	local := freePort(t)
	addr, err := net.ResolveTCPAddr("tcp", local)
	if err != nil {
		t.Fatal(err)
	}
	c := mustDial(t, &Dialer{NetDialer: net.Dialer{LocalAddr: addr}}, l.Addr().String())
	wantProvider(t, c, fakeName)
	if got := mustAccept(t, l).RemoteAddr().String(); got != local {
		t.Errorf("the acceptor sees %s, want %s", got, local)
	}

	// From an address of its own, IPv4's unspecified one is not 127.0.0.1.
	there := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.5:0")
	from := &net.TCPAddr{IP: net.IPv4(127, 0, 0, 5)}
	c = mustDial(t, &Dialer{NetDialer: net.Dialer{LocalAddr: from}}, "0.0.0.0:"+portOf(there.Addr().String()))
	wantProvider(t, c, fakeName)
	say(t, c, mustAccept(t, there), "here")

	for _, port := range []int{-1, 1 << 16} {
		_, err = (&Dialer{NetDialer: net.Dialer{LocalAddr: &net.TCPAddr{Port: port}}}).Dial("tcp", l.Addr().String())
		wantOpError(t, err, "dial", syscall.EINVAL)
	}
	_, err = (&Dialer{NetDialer: net.Dialer{LocalAddr: &net.UDPAddr{}}}).Dial("tcp", l.Addr().String())
	if err == nil || !strings.Contains(err.Error(), "mismatched local address type") {
		t.Errorf("a UDP address: %v", err)
	}
}

// TCP's dials cannot use a port that is bound. When SANs have used up their share of the
// ports of a network namespace, dials fall back to TCP.
func TestPortsAreLeftToTCP(t *testing.T) {
	const half = 50
	low := 32769 // odd, as nowhere else: it is read, and not remembered
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and ends with this goroutine
		done <- func() error {
			if err := ownNetwork(); err != nil {
				return err
			}
			ports := fmt.Sprintln(low, low+2*half-1)
			if err := os.WriteFile("/proc/sys/net/ipv4/ip_local_port_range", []byte(ports), 0); err != nil {
				return err
			}
			server, err := net.Listen("tcp", "127.0.0.1:80")
			if err != nil {
				return err
			}
			defer server.Close()
			r := request{remote: server.Addr().(*net.TCPAddr).AddrPort()}
			n := 0
			for ; n <= half; n++ {
				s, e := bind(t.Context(), r)
				if err = e; err != nil {
					break
				}
				defer s.Close()
			}
			if n != half || reasonOf(err) != ReasonResources {
				return fmt.Errorf("%d of %d ports bound, then %v", n, 2*half, err)
			}
			c, err := net.Dial("tcp", server.Addr().String())
			if err == nil {
				c.Close()
			}
			return err
		}()
	}()
	if err := <-done; errors.Is(err, syscall.EPERM) {
		testenv.Missing(t, "the right to make a network namespace")
	} else if err != nil {
		t.Error(err)
	}
}

// A server that speaks first, and one that counts what it receives: neither sees a byte
// that is not the application's.
func TestDialPlainServerSeesTheApplicationAlone(t *testing.T) {
	for _, policy := range []Policy{Prefer, Never} {
		t.Run(policy.String(), func(t *testing.T) {
			l := plainListen(t, "127.0.0.1:0")
			c := mustDial(t, &Dialer{Policy: policy}, l.Addr().String())
			s := mustAccept(t, l)
			say(t, s, c, "220 ready\r\n")
			say(t, c, s, "EHLO\r\n")
			c.Close()
			rest, err := io.ReadAll(s)
			if err != nil || len(rest) != 0 {
				t.Errorf("%d more bytes: %q, %v", len(rest), rest, err)
			}
		})
	}
}

// answering returns a resolver that knows only the given hosts. It speaks DNS to itself
// over a pipe.
func answering(t testing.TB, hosts map[string][]string) *net.Resolver {
	return &net.Resolver{
		PreferGo: true,
		Dial: func(context.Context, string, string) (net.Conn, error) {
			client, server := net.Pipe()
			go serveDNS(t, server, hosts)
			return client, nil
		},
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

func TestResolveKeepsNetsOrder(t *testing.T) {
	r := answering(t, map[string][]string{"two.test.": {"127.0.0.2", "127.0.0.1"}, "both.test.": {"::1", "127.0.0.1"}})
	for network, want := range map[string]string{"tcp": "[::1]:80 127.0.0.1:80", "tcp4": "127.0.0.1:80", "tcp6": "[::1]:80"} {
		got, _, err := resolve(t.Context(), r, network, "both.test:80", nil)
		if err != nil || strings.Trim(fmt.Sprint(got), "[]") != strings.Trim(want, "[]") {
			t.Errorf("%s: %v, %v; want %s", network, got, err, want)
		}
	}
	got, named, err := resolve(t.Context(), r, "tcp4", "two.test:80", nil)
	if err != nil || !named {
		t.Fatal(named, err)
	}
	want := []netip.AddrPort{netip.MustParseAddrPort("127.0.0.2:80"), netip.MustParseAddrPort("127.0.0.1:80")}
	if !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestResolveUnspecifiedIsThisHost(t *testing.T) {
	for _, c := range []struct{ network, address, want string }{
		{"tcp", ":80", "127.0.0.1:80"},
		{"tcp6", ":80", "[::1]:80"},
		{"tcp", "0.0.0.0:80", "127.0.0.1:80"},
		{"tcp", "[::]:80", "[::1]:80"},

		{"tcp", "[::ffff:127.0.0.1]:80", "127.0.0.1:80"},
		{"tcp", "127.0.0.1:http", "127.0.0.1:80"},
		{"tcp", "[fe80::1%lo]:80", "[fe80::1%lo]:80"},
		{"tcp6", "[::1%lo]:80", "[::1]:80"},
		{"tcp", "[::1%lo]:80", "[::1]:80"},
	} {
		got, named, err := resolve(t.Context(), nil, c.network, c.address, nil)
		if err != nil || named || len(got) == 0 || got[0].String() != c.want {
			t.Errorf("%s %s: %v, %v, %v; want %s", c.network, c.address, got, named, err, c.want)
		}
	}
}
