package verbs

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sanconn/san/internal/rdmalink"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/session"
	"github.com/sanconn/san/test/hwsim"
)

// hardwareLane is the lane of real devices (test/hardware). hardwareAddrs names the variable with the
// addresses of the dialer's and the listener's device: ADDRESS,ADDRESS.
const (
	hardwareLane  = "hardware"
	hardwareAddrs = "SAN_TEST_RDMA_ADDRESSES"
)

// The guest's pairs of interfaces (test/guest): what is sent from one end to the
// other crosses a virtual cable.
var laneAddrs = map[string][2]string{
	"rxe":  {"10.8.0.1", "10.8.0.2"},
	"siw":  {"10.8.1.1", "10.8.1.2"},
	"rxe6": {"fd08::1", "fd08::2"},
	"siw6": {"fd08:1::1", "fd08:1::2"},

	hwsim.Lane: {"127.0.0.1", "127.0.0.1"}, // of the simulated device (hwsim_test.go)
}

func cable(t testing.TB) (dialer, listener netip.Addr) {
	t.Helper()
	lane := testenv.NeedDevice(t)
	if lane == hwsim.Lane {
		serveOn(map[string]string{"lo": hwsim.Device})
	}
	a := laneAddrs[lane]
	if lane == hardwareLane {
		a[0], a[1], _ = strings.Cut(os.Getenv(hardwareAddrs), ",")
	}
	return netip.MustParseAddr(a[0]), netip.MustParseAddr(a[1])
}

// objects counts the objects that the kernel, or the simulated device, has.
func objects(t testing.TB) map[string]int {
	if testenv.Device() == hwsim.Lane {
		return hwsim.Objects(t)
	}
	return testenv.RDMAObjects(t)
}

// patience bounds each wait. A test that reaches it has failed.
const patience = 20 * time.Second

func patient(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// listener keeps the connections of a Listener for Accept.
type listener struct {
	*Listener
	came    chan *Endpoint
	windows bool // connections use their device's windows once they are made, whether or not it enforces them
}

func listenAt(addr netip.AddrPort, cfg Config) (*listener, error) {
	came := make(chan *Endpoint, mostMaking)
	l, err := Listen(addr, cfg, func(e *Endpoint) { came <- e })
	return &listener{Listener: l, came: came}, err
}

// Accept waits for the next connection, or for Close.
func (l *listener) Accept() (*Endpoint, error) {
	select {
	case e := <-l.came:
		return e, nil
	case <-l.ctx.Done():
		return nil, net.ErrClosed
	}
}

// addrs returns the addresses on which it listens.
func (l *listener) addrs() []netip.AddrPort {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cfg.WithoutCM {
		return []netip.AddrPort{l.addr}
	}
	var list []netip.AddrPort
	for _, x := range l.ids {
		list = append(list, x.tcp)
	}
	return list
}

// Close also ends connections that were not accepted.
func (l *listener) Close() error {
	err := l.Listener.Close()
	for {
		select {
		case e := <-l.came:
			e.discard()
		default:
			return err
		}
	}
}

// listen listens on the lane's device.
func listen(t testing.TB, cfg Config) *listener {
	t.Helper()
	cfg.Disable |= switchedOff()
	_, at := cable(t)
	l, err := listenAt(netip.AddrPortFrom(at, freePort()), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// lastPort is the port that freePort has returned last. Processes that run at the same time, as on the
// simulated device, begin at different ports, below those that the kernel assigns.
var lastPort = uint16(10000 + os.Getpid()*101%10000)

// freePort returns a port that no test has used before, because the connection manager keeps ports for a
// while. No socket listens on it, nor on its port for iWARP.
func freePort() uint16 {
	for {
		lastPort++
		if isFree(lastPort) && isFree(Config{}.withDefaults().iwarpPort(lastPort)) {
			return lastPort
		}
	}
}

func isFree(port uint16) bool {
	l, err := net.ListenTCP("tcp", &net.TCPAddr{Port: int(port)})
	if err != nil {
		return false
	}
	l.Close()
	return true
}

// switchedOff are the features that SAN_DISABLE names in the lanes without these.
var switchedOff = sync.OnceValue(func() (off session.Feature) {
	for _, name := range strings.FieldsFunc(os.Getenv("SAN_DISABLE"), func(r rune) bool { return r == ',' }) {
		feature, known := session.FeatureNames[name]
		if !known {
			panic(fmt.Sprintf("SAN_DISABLE: no feature %q", name))
		}
		off |= feature
	}
	return off
})

// without reports whether the tests run without a feature.
func without(f session.Feature) bool { return switchedOff()&f != 0 }

// connect makes a connection between the ends of the lane's cable.
func connect(l *listener, cfg Config) (dialed, accepted *Endpoint, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	cfg.Disable |= switchedOff()
	if l.windows {
		trustWindows(false) // so that the domain is the connection's own, unless the probe has ended
		defer trustWindows(true)
	}
	dialed, err = Dial(ctx, netip.Addr{}, l.addrs()[0], cfg)
	if err != nil {
		return nil, nil, err
	}
	accepted, err = accept(l)
	if err != nil {
		dialed.discard()
		return nil, nil, err
	}
	return dialed, accepted, nil
}

// trustWindows makes the devices in use trust windows, or not. A device's setting is forgotten when it
// is no longer used.
func trustWindows(yes bool) {
	devices.mu.Lock()
	defer devices.mu.Unlock()
	for _, d := range devices.m {
		d.windows.Store(yes)
	}
}

// accept waits for a connection, within patience.
func accept(l *listener) (*Endpoint, error) {
	type result struct {
		e   *Endpoint
		err error
	}
	got := make(chan result, 1)
	go func() {
		e, err := l.Accept()
		got <- result{e, err}
	}()
	select {
	case r := <-got:
		return r.e, r.err
	case <-time.After(patience):
		return nil, errors.New("the connection that was dialed is not handed out")
	}
}

// discard ends a connection, and releases what the endpoint holds.
func (e *Endpoint) discard() {
	e.Abort()
	e.Retire()
}

// sessions makes two sessions over the lane's device.
func sessions(t testing.TB, l *listener, cfg session.Config) (a, b *session.Session) {
	t.Helper()
	x, y, err := connect(l, l.cfg)
	if err != nil {
		t.Fatal(err)
	}
	return negotiate(t, x, y, cfg)
}

func negotiate(t testing.TB, x, y *Endpoint, cfg session.Config) (a, b *session.Session) {
	t.Helper()
	cfg.Disable |= switchedOff()
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

// reasonOf returns why there is no SAN, or ReasonNone if err does not tell.
func reasonOf(err error) session.Reason {
	var u *session.Unavailable
	if errors.As(err, &u) {
		return u.Reason
	}
	return session.ReasonNone
}

// run runs a command that changes the guest's network. It must not be used on a machine that does not
// belong to the tests, as with simulated and real devices.
func run(t testing.TB, name string, args ...string) string {
	t.Helper()
	if lane := testenv.Device(); lane == hwsim.Lane || lane == hardwareLane {
		t.Fatalf("%s %s: for the guest alone", name, strings.Join(args, " "))
	}
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// cableOfAll returns a cable on which an unspecified address includes the device's.
func cableOfAll(t testing.TB) netip.Addr {
	_, addr := cable(t)
	if testenv.Device() == hwsim.Lane {
		rdmalink.Simulated = map[string]string{"lo": hwsim.Device}
		t.Cleanup(func() { rdmalink.Simulated = nil })
	}
	return addr
}
