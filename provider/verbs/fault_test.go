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
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/internal/backlog"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/session"
)

// reasonOf is why there is no SAN, ReasonNone if err does not say.
func reasonOf(err error) session.Reason {
	var u *session.Unavailable
	if errors.As(err, &u) {
		return u.Reason
	}
	return session.ReasonNone
}

// run runs a command of the guest.
func run(t testing.TB, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// Wherever nobody answers, the dialer is told why, as soon as that is known, and
// at the end of its time at the latest.
func TestDialInVain(t *testing.T) {
	from, to := cable(t)
	wire := map[string]string{"rxe": "ve1", "siw": "wi1"}[testenv.Device()]
	dial := func(t *testing.T, at netip.AddrPort) error {
		t.Helper()
		before := runtime.NumGoroutine()
		ctx, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond)
		defer cancel()
		began := time.Now()
		e, err := Dial(ctx, netip.AddrPort{}, at, Config{})
		took := time.Since(began)
		if err == nil {
			e.discard()
			t.Fatal("connected")
		}
		t.Logf("%v: %v", took, err)
		if took > 5*time.Second { // the guest may be slow; unbounded it would be 38 s and more
			t.Errorf("took %v", took)
		}
		goroutinesGone(t, before, 3*patience)
		return err
	}

	// The first use loads the libraries, which takes the guest a while.
	Dial(patient(t), netip.AddrPort{}, netip.AddrPortFrom(to, freePort()), Config{})
	// How long a thread is stuck in rdma_connect is for TCP to say, on iWARP.
	run(t, "sysctl", "-qw", "net.ipv4.tcp_syn_retries=2")

	t.Run("no listener", func(t *testing.T) {
		if err := dial(t, netip.AddrPortFrom(to, freePort())); reasonOf(err) != session.ReasonNoListener {
			t.Errorf("%v, want %v", err, session.ReasonNoListener)
		}
	})
	t.Run("no route to an RDMA device", func(t *testing.T) {
		if err := dial(t, netip.MustParseAddrPort("127.0.0.1:80")); reasonOf(err) != session.ReasonUnreachable {
			t.Errorf("%v, want %v", err, session.ReasonUnreachable)
		}
	})
	t.Run("silence", func(t *testing.T) {
		// Packets get there and are not for anybody.
		silent := from.Next().Next().Next()
		peer := map[string]string{"rxe": "ve2", "siw": "wi2"}[testenv.Device()]
		ifi, err := net.InterfaceByName(peer)
		if err != nil {
			t.Fatal(err)
		}
		run(t, "ip", "route", "add", silent.String(), "dev", wire, "src", from.String())
		run(t, "ip", "neigh", "replace", silent.String(), "lladdr", ifi.HardwareAddr.String(), "dev", wire, "nud", "permanent")
		defer run(t, "ip", "route", "del", silent.String(), "dev", wire)
		if !Serves(silent, Config{}) {
			t.Errorf("%v is not served", silent)
		}
		err = dial(t, netip.AddrPortFrom(silent, 4711))
		if !errors.Is(err, context.DeadlineExceeded) && reasonOf(err) != session.ReasonTimeout && reasonOf(err) != session.ReasonUnreachable {
			t.Errorf("%v, want the end of the time", err)
		}
	})
	t.Run("nobody of that address", func(t *testing.T) {
		nobody := from.Next().Next().Next().Next()
		run(t, "ip", "route", "add", nobody.String(), "dev", wire, "src", from.String())
		defer run(t, "ip", "route", "del", nobody.String(), "dev", wire)
		err := dial(t, netip.AddrPortFrom(nobody, 4711))
		if !errors.Is(err, context.DeadlineExceeded) && reasonOf(err) == session.ReasonNone {
			t.Errorf("%v, want a reason", err)
		}
	})
	if testenv.Device() == "siw" {
		t.Run("plain TCP on the iWARP port", func(t *testing.T) {
			port := freePort()
			plain, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(netip.AddrPortFrom(to, Config{}.withDefaults().iwarpPort(port))))
			if err != nil {
				t.Fatal(err)
			}
			defer plain.Close()
			go func() {
				c, err := plain.Accept()
				if err == nil {
					io.Copy(io.Discard, c)
					c.Close()
				}
			}()
			err = dial(t, netip.AddrPortFrom(to, port))
			if !errors.Is(err, context.DeadlineExceeded) && reasonOf(err) == session.ReasonNone {
				t.Errorf("%v, want a reason", err)
			}
		})
	}
	t.Run("outside the allowed subnets", func(t *testing.T) {
		cfg := Config{Subnets: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}}
		if _, err := Dial(patient(t), netip.AddrPort{}, netip.AddrPortFrom(to, 1), cfg); reasonOf(err) != session.ReasonNotServed {
			t.Errorf("%v, want %v", err, session.ReasonNotServed)
		}
	})
}

// What a listener refuses, and why, reaches the dialer.
func TestRefusals(t *testing.T) {
	t.Run("backlog full", func(t *testing.T) {
		l := listen(t, Config{Backlog: 1})
		first, err := Dial(patient(t), netip.AddrPort{}, l.Addrs()[0], Config{})
		if err != nil {
			t.Fatal(err)
		}
		defer first.discard()
		if _, err := Dial(patient(t), netip.AddrPort{}, l.Addrs()[0], Config{}); !errors.Is(err, syscall.ECONNREFUSED) || reasonOf(err) != session.ReasonNone {
			t.Errorf("%v, want ECONNREFUSED", err)
		}
	})
	t.Run("subnet", func(t *testing.T) {
		l := listen(t, Config{Subnets: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}})
		if _, err := Dial(patient(t), netip.AddrPort{}, l.Addrs()[0], Config{}); reasonOf(err) != session.ReasonPermission {
			t.Errorf("%v, want %v", err, session.ReasonPermission)
		}
	})
}

// A port of the program's choice is not exchanged for another one without a word.
func TestFixedPort(t *testing.T) {
	here, to := cable(t)
	l := listen(t, Config{})
	from := netip.AddrPortFrom(here, freePort())
	ep, err := Dial(patient(t), from, netip.AddrPortFrom(to, l.addr.Port()), Config{FixedPort: true})
	if testenv.Device() == "siw" { // whose ports are TCP's own
		if reasonOf(err) != session.ReasonNotServed {
			t.Errorf("iWARP: %v", err)
		}
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	defer ep.discard()
	if got := ep.LocalAddr(); got != from {
		t.Errorf("it leaves from %v, want %v", got, from)
	}
}

// Something accepts where the ends would tell each other their queue pairs, and says
// nothing: the dial ends with its context, at once if that is cancelled.
func TestDialWithoutCMToSilence(t *testing.T) {
	_, to := cable(t)
	if testenv.Device() == "siw" {
		return // iWARP connects by rdma_cm alone
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
		_, err := Dial(ctx, netip.AddrPort{}, netip.AddrPortFrom(to, port), cfg)
		cancel()
		if took := time.Since(began); !errors.Is(err, want) || took > patience/2 {
			t.Errorf("%v after %v, want %v", err, took, want)
		}
	}
}

// Who asks for a connection and does not go on to make it does not keep a backlog from
// others until its time is up.
func TestHalfOpenRequests(t *testing.T) {
	cable(t)
	if testenv.Device() == "siw" {
		return // asking takes a queue pair, and the listener's end is established with it
	}
	cfg := Config{Backlog: 2}
	l := listen(t, cfg)
	for i := range cfg.Backlog {
		request(t, l, uint32(1000+i)) // whose answer is never taken, so that librdmacm does not go on
	}
	expectPlaces(t, l)
}

// request asks for a connection in the name of a queue pair that may be none of ours.
func request(t *testing.T, l *Listener, qp uint32) (answers *ibv.EventChannel) {
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
	expect(id.ResolveAddr(netip.AddrPort{}, l.Addrs()[0], time.Second), ibv.AddrResolved)
	expect(id.ResolveRoute(time.Second), ibv.RouteResolved)
	if err := id.Connect(ibv.ConnParam{PrivateData: privateData{version: protocolVersion}.bytes(), QPNum: qp, RetryCount: retryCount}); err != nil {
		t.Fatal(err)
	}
	return channel
}

// An attempt of a queue pair whose number the peer has a connection of is refused as that,
// and not as by a foreign program.
func TestStaleConnection(t *testing.T) {
	cable(t)
	if testenv.Device() == "siw" {
		return // connections of iWARP have no such numbers
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

// expectPlaces waits until a listener whose backlog is full of connections that are not
// made gives all of its places to others.
func expectPlaces(t *testing.T, l *Listener) {
	t.Helper()
	began := time.Now()
	for range l.cfg.Backlog {
		testenv.Eventually(t, patience, func() error {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			e, err := Dial(ctx, netip.AddrPort{}, netip.AddrPortFrom(l.Addrs()[0].Addr(), l.addr.Port()), Config{WithoutCM: l.cfg.WithoutCM})
			if err == nil {
				t.Cleanup(e.discard)
			}
			return err
		})
	}
	if took := time.Since(began); took < backlog.Slow/2 || took > acceptTime*9/10 {
		t.Errorf("it took %v", took)
	}
	if e, err := Dial(patient(t), netip.AddrPort{}, netip.AddrPortFrom(l.Addrs()[0].Addr(), l.addr.Port()), Config{WithoutCM: l.cfg.WithoutCM}); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("beyond the backlog: %v", err)
		if err == nil {
			e.discard()
		}
	}
}

// Where there are iWARP devices alone, neither end can do without rdma_cm, and says so.
func TestWithoutCMOnIWARP(t *testing.T) {
	_, to := cable(t)
	cfg := Config{WithoutCM: true}
	l, err := Listen(netip.AddrPortFrom(to, freePort()), cfg)
	if testenv.Device() != "siw" {
		if err != nil {
			t.Fatal(err)
		}
		l.Close()
		return
	}
	if err == nil {
		l.Close()
	}
	if reasonOf(err) != session.ReasonNotServed || !strings.Contains(fmt.Sprint(err), "siw2 is an iWARP device") {
		t.Errorf("a listener: %v", err)
	}
	port := freePort()
	other, err := net.Listen("tcp", netip.AddrPortFrom(to, cfg.withDefaults().iwarpPort(port)).String())
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	nothingLeft(t)
	if _, err := Dial(patient(t), netip.AddrPort{}, netip.AddrPortFrom(to, port), cfg); reasonOf(err) != session.ReasonNotServed ||
		!strings.Contains(fmt.Sprint(err), "siw1 is an iWARP device") {
		t.Errorf("a dial: %v", err)
	}
}

// A dialer whose queue pair is said to be at another address than it came from is
// refused: the subnets that are allowed are those of the queue pairs.
func TestCardOfAnotherHost(t *testing.T) {
	from, to := cable(t)
	if testenv.Device() == "siw" {
		return // iWARP connects by rdma_cm alone
	}
	cfg := Config{WithoutCM: true}
	l := listen(t, cfg)
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: from.AsSlice()}}
	conn, err := d.Dial("tcp", netip.AddrPortFrom(to, l.cfg.iwarpPort(l.addr.Port())).String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(patience))
	c := connParams{privateData: privateData{version: protocolVersion}, mtu: 3, served: 1}
	c.peer.QPNum = 17
	c.peer.GID = netip.MustParseAddr("::ffff:192.0.2.7").As16()
	if _, err := conn.Write(c.bytes()); err != nil {
		t.Fatal(err)
	}
	if theirs, err := readParams(conn); err != nil || theirs.refusal != refusedSubnet {
		t.Errorf("%+v, %v, want it refused for its subnet", theirs.privateData, err)
	}
}

// A listener on :: that takes no IPv4 takes none over RDMA either.
func TestListenerOfIPv6Alone(t *testing.T) {
	cable(t)
	for _, alone := range []bool{true, false} {
		l, err := Listen(netip.AddrPortFrom(netip.IPv6Unspecified(), freePort()), Config{V6Only: alone})
		if err != nil {
			t.Fatal(err)
		}
		var v4 []netip.AddrPort
		for _, a := range l.Addrs() {
			if a.Addr().Is4() {
				v4 = append(v4, a)
			}
		}
		if alone != (len(v4) == 0) {
			t.Errorf("IPv6 alone: %v; it listens on %v", alone, v4)
		}
		l.Close()
	}
}

// Programs of rdma-core that meet us by mistake, and we them.
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
		if ctx.Err() != nil || !errors.As(err, new(*exec.ExitError)) { // it ran, and in vain
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
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
			_, err := Dial(ctx, netip.AddrPort{}, netip.AddrPortFrom(to, port), Config{})
			cancel()
			if reasonOf(err) == session.ReasonNoListener && time.Now().Before(end) {
				continue // it is not there yet
			}
			if reasonOf(err) != session.ReasonProtocol {
				t.Errorf("%v, want %v", err, session.ReasonProtocol)
			}
			return
		}
	})
}

// sessions makes two sessions over the lane's device.
func sessions(t testing.TB, l *Listener, cfg session.Config) (a, b *session.Session) {
	t.Helper()
	x, y, err := connect(l, l.cfg)
	if err != nil {
		t.Fatal(err)
	}
	return negotiate(t, x, y, cfg)
}

func negotiate(t testing.TB, x, y *Endpoint, cfg session.Config) (a, b *session.Session) {
	t.Helper()
	a, b = session.New(x, cfg), session.New(y, cfg)
	t.Cleanup(a.Abort)
	t.Cleanup(b.Abort)
	var wg sync.WaitGroup
	var ea, eb error
	wg.Go(func() { ea = a.Negotiate(patient(t)) })
	wg.Go(func() { eb = b.Negotiate(patient(t)) })
	wg.Wait()
	if err := errors.Join(ea, eb); err != nil {
		t.Fatal(err)
	}
	return a, b
}

// cables counts those of ownCable.
var cables int

// ownCable makes a cable that the test may break, with its devices, and returns
// their names and the address to listen on.
func ownCable(t testing.TB) (netdev, rdma string, listen netip.Addr) {
	t.Helper()
	cable(t)
	cables++
	n := 30 + cables
	replace := strings.NewReplacer("NET", fmt.Sprintf("10.8.%d", n), "TABLE", fmt.Sprint(100+n),
		"LOW", fmt.Sprint(10+cables), "MID", fmt.Sprint(30+cables), "KIND", testenv.Device(), "N", fmt.Sprint(n))
	run(t, "bash", "-c", replace.Replace(`set -e
	ip link add bN1 mtu 9000 type veth peer name bN2 mtu 9000
	for i in 1 2; do
		peer=$((3 - i))
		sysctl -qw net.ipv4.conf.bN$i.rp_filter=0 net.ipv4.conf.bN$i.accept_local=1
		ip addr add NET.$i/32 dev bN$i
		ip link set bN$i up
		ip route add NET.$peer dev bN$i src NET.$i table TABLE
		ip rule add pref MID oif bN$i to NET.$peer lookup TABLE
	done
	ip rule add pref LOW iif lo to NET.0/30 lookup TABLE
	rdma link add brN1 type KIND netdev bN1
	rdma link add brN2 type KIND netdev bN2`))
	return fmt.Sprintf("b%d1", n), fmt.Sprintf("br%d1", n), netip.MustParseAddr(fmt.Sprintf("10.8.%d.2", n))
}

// A cable that is pulled, a device that goes: both ends of a transfer find an
// error within the bounds of keepalive, closing does not hang, and nothing is left:
// also where it is the callers' own memory that is exposed and read just then.
func TestBreaks(t *testing.T) {
	cable(t)
	for _, tt := range []struct {
		name    string
		deleted bool // the device; otherwise the link goes down
		own     bool // each Write's own memory, by RDMA read
	}{
		{name: "link down"},
		{name: "link down, own memory", own: true},
		{name: "device deleted", deleted: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			netdev, rdma, at := ownCable(t)
			l, err := Listen(netip.AddrPortFrom(at, freePort()), Config{})
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			first, second, err := connect(l, Config{}) // what a device's first use leaves behind
			if err != nil {
				t.Fatal(err)
			}
			first.discard()
			second.discard()
			nothingLeft(t)
			cfg := session.Config{KeepAlive: 500 * time.Millisecond, CancelTimeout: time.Second}
			if tt.own {
				cfg.Threshold, cfg.Disable = 4<<10, session.FeatureRDMAWrite
			}
			a, b := sessions(t, l, cfg)
			var wg sync.WaitGroup
			flowing := make(chan struct{})
			var once sync.Once
			ends := make(chan error, 4)
			for _, s := range []*session.Session{a, b} {
				wg.Go(func() {
					buf := make([]byte, 1<<20)
					for {
						if _, err := s.Write(buf); err != nil {
							ends <- err
							return
						}
					}
				})
				wg.Go(func() {
					buf := make([]byte, 1<<20)
					for total := 0; ; {
						n, err := s.Read(buf)
						if err != nil {
							ends <- err
							return
						}
						if total += n; total > 8<<20 {
							once.Do(func() { close(flowing) })
						}
					}
				})
			}
			<-flowing
			if tt.own && a.Stats().OffersSent+b.Stats().OffersSent == 0 {
				t.Error("no Write's own memory was offered")
			}
			began := time.Now()
			if tt.deleted {
				del := exec.Command("rdma", "link", "delete", rdma)
				if err := del.Start(); err != nil {
					t.Fatal(err)
				}
			} else {
				run(t, "ip", "link", "set", netdev, "down")
			}
			for range cap(ends) {
				select {
				case err := <-ends:
					t.Logf("after %v: %v", time.Since(began), err)
					if !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.ETIMEDOUT) && !errors.Is(err, syscall.EPIPE) {
						t.Errorf("the end is %v", err)
					}
				case <-time.After(patience):
					stacks := make([]byte, 1<<20)
					t.Fatalf("no error\n%s", stacks[:runtime.Stack(stacks, true)])
				}
			}
			wg.Wait()
			for _, s := range []*session.Session{a, b} {
				s.Close()
				select {
				case <-s.Closed():
				case <-time.After(patience):
					t.Fatal("Close hangs")
				}
			}
		})
	}
}

// A device that goes and comes back is listened on again, on its own address as
// well as on all of them. A software device is not gone, and cannot come back, before
// the processes that have it open have ended: here it is the event that comes alone.
func TestListenerOutlivesItsDevice(t *testing.T) {
	_, at := cable(t)
	for _, where := range []netip.Addr{at, netip.IPv4Unspecified()} {
		addr := netip.AddrPortFrom(at, freePort())
		l, err := Listen(netip.AddrPortFrom(where, addr.Port()), Config{})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		for range 3 {
			l.mu.Lock()
			x := l.ids[at]
			l.mu.Unlock()
			if x == nil {
				t.Fatalf("listening on %v: %v is not listened on", where, at)
			}
			x.event(ibv.Event{Type: ibv.DeviceRemoval, ID: x.id})
			testenv.Eventually(t, patience, func() error {
				l.mu.Lock()
				defer l.mu.Unlock()
				if y := l.ids[at]; y == nil || y == x {
					return errors.New("it does not listen again")
				}
				return nil
			})
			a, err := Dial(patient(t), netip.AddrPort{}, addr, Config{})
			if err != nil {
				t.Fatalf("listening on %v: %v", where, err)
			}
			b, err := accept(l)
			if err != nil {
				t.Fatal(err)
			}
			a.discard()
			b.discard()
		}
	}
}

// One whose device has gone says that it does not listen there, and ends.
func TestListenerWithoutItsDevice(t *testing.T) {
	_, rdma, at := ownCable(t)
	l, err := Listen(netip.AddrPortFrom(at, freePort()), Config{})
	if err != nil {
		t.Fatal(err)
	}
	del := exec.Command("rdma", "link", "delete", rdma[:len(rdma)-1]+"2") // the listener's end
	if err := del.Start(); err != nil {                                   // it ends with this process
		t.Fatal(err)
	}
	testenv.Eventually(t, patience, func() error {
		if len(l.Addrs()) != 0 {
			return fmt.Errorf("it still says that it listens: %v", l.Addrs())
		}
		return nil
	})
	ended := make(chan struct{})
	go func() {
		l.Close()
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(patience):
		t.Fatal("Close hangs")
	}
}

// What connections held is given back, whichever way they end.
func TestNothingIsLeft(t *testing.T) {
	l := listen(t, Config{})
	round := func(how int) {
		a, b, err := connect(l, Config{})
		if err != nil {
			t.Fatal(err)
		}
		begin(a)
		begin(b)
		if _, err := b.mem.Expose(make([]byte, 1<<16), session.RemoteRead); err != nil {
			t.Fatal(err)
		}
		a.mem.Alloc(1 << 16)
		switch how % 3 {
		case 0:
			a.Close()
			b.Close()
		case 1:
			a.discard()
			b.discard()
		case 2:
			b.Close()
			a.discard()
		}
	}
	round(0)
	nothingLeft(t)
	goroutines := runtime.NumGoroutine()
	for i := range 12 {
		round(i)
	}
	goroutinesGone(t, goroutines, patience)
}

// goroutinesGone waits until there are no more than before.
func goroutinesGone(t testing.TB, before int, limit time.Duration) {
	t.Helper()
	testenv.Eventually(t, limit, func() error {
		if n := runtime.NumGoroutine(); n > before {
			stacks := make([]byte, 1<<20)
			return fmt.Errorf("%d goroutines, %d before:\n%s", n, before, stacks[:runtime.Stack(stacks, true)])
		}
		return nil
	})
}

// nothingLeft checks at the end of the test, when its other cleanups have run,
// that the kernel has no more objects of each kind than now (windows show in
// their protection domain, which would not go without them), and that no more
// buffers are in use. It keeps a listener open, as a device's first use leaves
// librdmacm's own objects behind.
func nothingLeft(t testing.TB) {
	t.Helper()
	listen(t, Config{})
	before := testenv.RDMAObjects(t)
	_, used := controlArena().Bytes()
	t.Cleanup(func() {
		if t.Failed() {
			return // what a failed test left behind explains nothing
		}
		testenv.Eventually(t, patience, func() (err error) {
			for what, n := range testenv.RDMAObjects(t) {
				if n > before[what] {
					err = errors.Join(err, fmt.Errorf("%d %s, before %d", n, what, before[what]))
				}
			}
			return err
		})
		if _, u := controlArena().Bytes(); u > used {
			t.Errorf("%d bytes of the arena are in use, before %d", u, used)
		}
	})
}

// What is exposed is taken back when Close and Abort return, also where no thread is free
// for librdmacm's calls, which on iWARP go on in the background.
func TestExposedIsTakenBackAtOnce(t *testing.T) {
	l := listen(t, Config{})
	for name, end := range map[string]func(*Endpoint){
		"Close": func(e *Endpoint) { e.Close() },
		"Abort": (*Endpoint).Abort,
	} {
		a, b, err := connect(l, Config{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := b.mem.Expose(make([]byte, 64<<10), session.RemoteWrite); err != nil {
			t.Fatal(err)
		}
		busy := make(chan struct{})
		for range maxBlocked {
			blocking.run(0, func() { <-busy })
		}
		end(b)
		b.mem.exposures.mu.Lock()
		left := b.mem.exposures.m
		b.mem.exposures.mu.Unlock()
		// What is cached besides is local, and of no use to a peer.
		if st := b.dom.cache.Stats(); left != nil || int(st.PinnedEntries) != int(st.Entries) {
			t.Errorf("behind %s: %d exposures, %+v", name, len(left), st)
		}
		close(busy)
		a.discard()
	}
	nothingLeft(t)
}
