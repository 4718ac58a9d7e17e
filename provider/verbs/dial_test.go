package verbs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os/exec"
	"runtime"
	"testing"
	"time"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/session"
)

// Without a device, each call that needs one returns the reason at once.
func TestWithoutDevices(t *testing.T) {
	testenv.NeedNoDevice(t)
	at := netip.MustParseAddrPort("192.0.2.1:80")
	if whyNotServed(at.Addr()) == nil {
		t.Error("a destination is served")
	}
	if _, err := Dial(context.Background(), netip.Addr{}, at, Config{}); reasonOf(err) == session.ReasonNone {
		t.Errorf("Dial: %v", err)
	}
	for _, a := range []string{"0.0.0.0:8123", "127.0.0.1:8123", "[::]:8123"} {
		if _, err := listenAt(netip.MustParseAddrPort(a), Config{}); reasonOf(err) == session.ReasonNone {
			t.Errorf("Listen on %s: %v", a, err)
		}
		l, err := listenAt(netip.MustParseAddrPort(a), Config{WithoutCM: true})
		if err == nil {
			l.Close()
		}
		if why := reasonOf(err); why != session.ReasonNotServed && why != session.ReasonNoProvider {
			t.Errorf("Listen on %s without rdma_cm: %v", a, err)
		}
	}
}

// inVain returns the ends of a cable on which dials fail as fast as possible.
func inVain(t *testing.T) (from, to netip.Addr) {
	t.Helper()
	from, to = cable(t)
	// The first use loads the libraries, which takes long in the guest.
	Dial(patient(t), netip.Addr{}, netip.AddrPortFrom(to, freePort()), Config{})
	// On iWARP, TCP's retries decide how long a thread is in rdma_connect.
	run(t, "sysctl", "-qw", "net.ipv4.tcp_syn_retries=2")
	return from, to
}

// silence is the timeout of a dial that gets no answer.
const silence = 500 * time.Millisecond

// dialInVain returns why a dial fails. The dial must fail soon, and leave nothing behind.
func dialInVain(t *testing.T, at netip.AddrPort, limit time.Duration) error {
	t.Helper()
	before := runtime.NumGoroutine()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	began := time.Now()
	e, err := Dial(ctx, netip.Addr{}, at, Config{})
	took := time.Since(began)
	if err == nil {
		e.discard()
		t.Fatal("connected")
	}
	t.Logf("%v: %v", took, err)
	if took > 5*time.Second { // the guest may be slow; without a bound it would be at least 38 s
		t.Errorf("took %v", took)
	}
	goroutinesGone(t, before, 3*patience)
	return err
}

// If it is known that nobody answers, the dialer gets the reason.
func TestDialInVain(t *testing.T) {
	_, to := inVain(t)
	t.Run("no listener", func(t *testing.T) {
		if err := dialInVain(t, netip.AddrPortFrom(to, freePort()), patience); reasonOf(err) != session.ReasonNoListener {
			t.Errorf("%v, want %v", err, session.ReasonNoListener)
		}
	})
	t.Run("no route to an RDMA device", func(t *testing.T) {
		if err := dialInVain(t, netip.MustParseAddrPort("127.0.0.1:80"), patience); reasonOf(err) != session.ReasonUnreachable {
			t.Errorf("%v, want %v", err, session.ReasonUnreachable)
		}
	})
	t.Run("outside the allowed subnets", func(t *testing.T) {
		cfg := Config{Subnets: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}}
		if _, err := Dial(patient(t), netip.Addr{}, netip.AddrPortFrom(to, 1), cfg); reasonOf(err) != session.ReasonNotServed {
			t.Errorf("%v, want %v", err, session.ReasonNotServed)
		}
	})
}

// If nothing answers, the dial ends no later than its context.
func TestDialToSilence(t *testing.T) {
	from, to := inVain(t)
	wire := map[string]string{"rxe": "ve1", "siw": "wi1"}[testenv.Device()]
	route := func(t *testing.T, to netip.Addr) {
		t.Helper()
		run(t, "ip", "route", "add", to.String(), "dev", wire, "src", from.String())
		t.Cleanup(func() { run(t, "ip", "route", "del", to.String(), "dev", wire) })
	}
	t.Run("packets that are not for anybody", func(t *testing.T) {
		silent := from.Next().Next().Next()
		peer := map[string]string{"rxe": "ve2", "siw": "wi2"}[testenv.Device()]
		ifi, err := net.InterfaceByName(peer)
		if err != nil {
			t.Fatal(err)
		}
		route(t, silent)
		run(t, "ip", "neigh", "replace", silent.String(), "lladdr", ifi.HardwareAddr.String(), "dev", wire, "nud", "permanent")
		if err := whyNotServed(silent); err != nil {
			t.Errorf("%v is not served: %v", silent, err)
		}
		err = dialInVain(t, netip.AddrPortFrom(silent, 4711), silence)
		if !errors.Is(err, context.DeadlineExceeded) && reasonOf(err) != session.ReasonTimeout && reasonOf(err) != session.ReasonUnreachable {
			t.Errorf("%v, want the end of the time", err)
		}
	})
	t.Run("nobody of that address", func(t *testing.T) {
		nobody := from.Next().Next().Next().Next()
		route(t, nobody)
		expectAReason(t, dialInVain(t, netip.AddrPortFrom(nobody, 4711), silence))
	})
	if testenv.Device() == "siw" {
		t.Run("plain TCP on the iWARP port", func(t *testing.T) {
			port := freePort()
			acceptSilently(t, netip.AddrPortFrom(to, Config{}.withDefaults().iwarpPort(port)))
			expectAReason(t, dialInVain(t, netip.AddrPortFrom(to, port), silence))
		})
	}
}

// expectAReason is for a dial that may also end with its context.
func expectAReason(t *testing.T, err error) {
	t.Helper()
	if !errors.Is(err, context.DeadlineExceeded) && reasonOf(err) == session.ReasonNone {
		t.Errorf("%v, want a reason", err)
	}
}

// acceptSilently accepts a TCP connection, and sends nothing.
func acceptSilently(t *testing.T, at netip.AddrPort) {
	t.Helper()
	plain, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(at))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { plain.Close() })
	go func() {
		c, err := plain.Accept()
		if err == nil {
			io.Copy(io.Discard, c)
			c.Close()
		}
	}()
}

// Without rdma_cm: a process accepts where the ends would exchange their queue pairs, and sends nothing.
// The dial ends with its context, and at once if that is cancelled.
func TestDialWithoutCMToSilence(t *testing.T) {
	_, to := cable(t)
	if testenv.Device() == "siw" {
		return // iWARP cannot do without rdma_cm
	}
	cfg := Config{WithoutCM: true}
	port := freePort()
	silent, err := net.Listen("tcp", netip.AddrPortFrom(to, cfg.withDefaults().iwarpPort(port)).String())
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	nothingLeft(t)
	for want, bound := range map[error]func() (context.Context, context.CancelFunc){
		context.Canceled: func() (context.Context, context.CancelFunc) {
			ctx, cancel := context.WithCancel(t.Context())
			time.AfterFunc(300*time.Millisecond, cancel)
			return ctx, cancel
		},
		context.DeadlineExceeded: func() (context.Context, context.CancelFunc) {
			return context.WithTimeout(t.Context(), 300*time.Millisecond)
		},
	} {
		ctx, cancel := bound()
		began := time.Now()
		_, err := Dial(ctx, netip.Addr{}, netip.AddrPortFrom(to, port), cfg)
		cancel()
		if took := time.Since(began); !errors.Is(err, want) || took > patience/2 {
			t.Errorf("%v after %v, want %v", err, took, want)
		}
	}
}

// request requests a connection for a queue pair's number, which may be of no queue pair here.
func request(t *testing.T, l *listener, qp uint32) (answers *ibv.EventChannel) {
	t.Helper()
	channel, err := ibv.NewEventChannel()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { channel.Close() })
	id, err := channel.NewID()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { id.Close() })
	channel.SetDeadline(time.Now().Add(patience))
	expect := func(err error, want ibv.EventType) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		if ev, err := channel.Event(); err != nil || ev.Type != want {
			t.Fatalf("%v, %v, want %v", ev.Type, err, want)
		}
	}
	expect(id.ResolveAddr(netip.AddrPort{}, l.addrs()[0], patience), ibv.AddrResolved)
	expect(id.ResolveRoute(patience), ibv.RouteResolved)
	if err := id.Connect(ibv.ConnParam{PrivateData: privateData{Version: protocolVersion}.bytes(), QPNum: qp, RetryCount: retryCount}); err != nil {
		t.Fatal(err)
	}
	return channel
}

// If a request comes from a queue pair with whose number the peer has a connection already, the refusal
// tells that. It must not look like that of a foreign program.
func TestStaleConnection(t *testing.T) {
	cable(t)
	if testenv.Device() == "siw" {
		return // iWARP's connections do not have such numbers
	}
	l := listen(t, Config{})
	a, b := pair(t, l, Config{})
	defer a.discard()
	defer b.discard()
	ev, err := request(t, l, a.q.qp.Num).Event()
	if err != nil {
		t.Fatal(err)
	}
	if err := eventError(ev); ev.Type != ibv.Rejected || err != errStale {
		t.Errorf("%v, status %d: %v", ev.Type, ev.Status, err)
	}
}

// A program of rdma-core connects to this package's listener by mistake, and this package to such a
// program's.
func TestForeignPrograms(t *testing.T) {
	_, to := cable(t)
	rdmaPort := func(p uint16) string {
		if testenv.Device() == "siw" {
			p = Config{}.withDefaults().iwarpPort(p)
		}
		return fmt.Sprint(p)
	}
	t.Run("rping dials us", func(t *testing.T) {
		l := listen(t, Config{})
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		out, err := exec.CommandContext(ctx, "rping", "-c", "-a", to.String(), "-p", rdmaPort(l.addr.Port()), "-C", "1").CombinedOutput()
		if ctx.Err() != nil || !errors.As(err, new(*exec.ExitError)) { // it ran, and failed as expected
			t.Errorf("rping: %v, %v\n%s", ctx.Err(), err, out)
		}
		a, b, err := connect(l, Config{})
		if err != nil {
			t.Fatalf("the listener does not go on: %v", err)
		}
		a.discard()
		b.discard()
	})
	t.Run("we dial rping", func(t *testing.T) {
		port := freePort()
		server := exec.Command("rping", "-s", "-a", to.String(), "-p", rdmaPort(port), "-C", "1")
		if err := server.Start(); err != nil {
			t.Fatal(err)
		}
		defer server.Wait()
		defer server.Process.Kill()
		for end := time.Now().Add(patience); ; {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			_, err := Dial(ctx, netip.Addr{}, netip.AddrPortFrom(to, port), Config{})
			cancel()
			if reasonOf(err) == session.ReasonNoListener && time.Now().Before(end) {
				continue // it does not listen yet
			}
			if reasonOf(err) != session.ReasonProtocol {
				t.Errorf("%v, want %v", err, session.ReasonProtocol)
			}
			return
		}
	})
}
