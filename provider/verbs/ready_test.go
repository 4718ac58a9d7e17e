//go:build linux

package verbs

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/regcache"
	"github.com/sanconn/san/session"
	"github.com/sanconn/san/test/hwsim"
)

// withoutReady makes the test's connections create their own endpoints.
func withoutReady(t testing.TB) {
	usual := readyEndpoints
	readyEndpoints = 0
	t.Cleanup(func() { readyEndpoints = usual })
}

// readyNumbers returns the numbers of the queue pairs that are ready on a device.
func readyNumbers(d *device) (list []uint32) {
	for _, e := range d.ready.all() {
		list = append(list, e.q.qp.Num)
	}
	return list
}

// isFilling reports whether endpoints are being made ready.
func (r *readyPool) isFilling() bool {
	if r.filling.TryLock() {
		r.filling.Unlock()
		return false
	}
	return true
}

// filled waits until no endpoint is being made ready.
func (r *readyPool) filled() {
	r.filling.Lock()
	defer r.filling.Unlock()
}

// putBack makes an endpoint that the test has taken count as ready again.
func (r *readyPool) putBack(e *Endpoint) {
	r.mu.Lock()
	r.list = append(r.list, e)
	r.mu.Unlock()
}

// awaitReady waits until each device has as many endpoints ready as it may have.
func awaitReady(t testing.TB, devices ...*device) {
	t.Helper()
	testenv.Eventually(t, patience, func() error {
		for _, d := range devices {
			if n := len(readyNumbers(d)); n != readyEndpoints || d.ready.isFilling() {
				return fmt.Errorf("%d are ready on %s", n, d.ctx.Name)
			}
		}
		return nil
	})
}

// shareOf returns how many bytes of the control buffers are charged to a peer. Without a peer it returns
// those of ready endpoints.
func shareOf(peer netip.Addr) int64 {
	peerBudgets.mu.Lock()
	defer peerBudgets.mu.Unlock()
	return peerBudgets.m[peerBudget{controlArena(), peer}]
}

// pairWithReady returns a connection whose devices have as many endpoints ready as they may have.
func pairWithReady(t *testing.T, cfg Config) (l *listener, a, b *Endpoint) {
	t.Helper()
	l = listen(t, cfg)
	a, b = pair(t, l, cfg)
	pair(t, l, cfg)
	awaitReady(t, a.dev, b.dev)
	return l, a, b
}

// After the first connection, further ones use endpoints that were made ahead, with their own settings.
// Endpoints that nobody uses leave nothing behind.
func TestReady(t *testing.T) {
	for _, tt := range []struct {
		name string
		cfg  Config
	}{
		{"domains of their own", Config{Disable: session.FeatureWindows}},
		{"a shared domain", Config{Disable: session.FeatureWindows, SharedDomain: true}},
		{"without rdma_cm", Config{Disable: session.FeatureWindows, WithoutCM: true}},
	} {
		if tt.cfg.WithoutCM && testenv.Device() == "siw" {
			continue // iWARP cannot do without rdma_cm
		}
		t.Run(tt.name, func(t *testing.T) {
			nothingLeft(t)
			l := listen(t, tt.cfg)
			a, b := pair(t, l, tt.cfg) // keeps the dialer's device in use
			pair(t, l, tt.cfg)
			awaitReady(t, a.dev, b.dev)

			before := map[*device][]uint32{a.dev: readyNumbers(a.dev), b.dev: readyNumbers(b.dev)}
			none, has := shareOf(netip.Addr{}), shareOf(a.peer)
			cfg := tt.cfg
			cfg.Threshold = 3 << 20
			c, d := pair(t, l, cfg)
			for _, e := range []*Endpoint{c, d} {
				if !slices.Contains(before[e.dev], e.q.qp.Num) {
					t.Errorf("queue pair %d is none of those that were ready, %v", e.q.qp.Num, before[e.dev])
				}
			}
			if got := c.Limits().Threshold; got != cfg.Threshold || d.Limits().Threshold != defaultThreshold {
				t.Errorf("a threshold of %d, want the connection's own, %d", got, cfg.Threshold)
			}
			x, y := session.New(c, session.Config{}), session.New(d, session.Config{Accepting: true})
			defer x.Abort()
			defer y.Abort()
			go func() {
				if y.Negotiate(patient(t)) == nil {
					b := make([]byte, 100<<10)
					for n, err := y.Read(b); err == nil; n, err = y.Read(b) {
						y.Write(b[:n])
					}
				}
			}()
			if err := x.Negotiate(patient(t)); err != nil {
				t.Fatal(err)
			}
			echo(t, x, 64)
			echo(t, x, 100<<10)

			awaitReady(t, a.dev, b.dev)
			size := int64(c.cfg.sendBytes() + c.cfg.receiveBytes())
			if now := shareOf(netip.Addr{}); now != none {
				t.Errorf("what is ready has %d bytes, before %d", now, none)
			}
			if now := shareOf(a.peer); now < has+size {
				t.Errorf("the peer of one more connection has %d bytes, before %d", now, has)
			}
		})
	}
}

// A ready endpoint is not used for a connection that needs other settings, nor for a peer whose share is
// used up. One that has failed is not used at all. Such connections make their own.
func TestReadyForOthers(t *testing.T) {
	nothingLeft(t)
	cfg := Config{Disable: session.FeatureWindows}
	l, a, b := pairWithReady(t, cfg)
	ready := readyNumbers(a.dev)

	e, _ := pair(t, l, Config{Disable: session.FeatureWindows | session.FeatureRegCache})
	if slices.Contains(ready, e.q.qp.Num) {
		t.Error("an endpoint for other features was taken")
	}
	awaitReady(t, a.dev, b.dev)

	full := peerBudget{controlArena(), netip.MustParseAddr("192.0.2.1")}
	all := peerShare * controlArena().Left()
	peerBudgets.mu.Lock()
	peerBudgets.m[full] = all
	peerBudgets.mu.Unlock()
	ready = readyNumbers(a.dev)
	if e := a.dev.ready.get(full.peer, a.cfg); e != nil {
		t.Error("a peer that has its share got one more")
		a.dev.ready.putBack(e)
	}
	if now := readyNumbers(a.dev); !slices.Equal(now, ready) {
		t.Errorf("ready are %v, before %v", now, ready)
	}
	full.giveBack(all)

	for _, d := range []*device{a.dev, b.dev} {
		for _, e := range d.ready.all() {
			e.q.fail(deviceError(syscall.EIO))
		}
	}
	c, d := pair(t, l, cfg)
	if slices.Contains(ready, c.q.qp.Num) {
		t.Error("a queue pair that has failed was taken")
	}
	for _, e := range []*Endpoint{c, d} {
		if err := e.Err(); err != nil {
			t.Error(err)
		}
	}
	awaitReady(t, a.dev, b.dev)
	for _, d := range []*device{a.dev, b.dev} {
		for _, e := range d.ready.all() {
			if e.q.over() {
				t.Errorf("queue pair %d, which has failed, is kept", e.q.qp.Num)
			}
		}
	}
	a.dev.fail(deviceError(syscall.EIO))
	if err := c.Err(); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the connection of a device that has failed: %v", err)
	}
}

// If a device has failed, its ready endpoints are not used.
func TestReadyOfAFailedDevice(t *testing.T) {
	nothingLeft(t)
	cfg := Config{Disable: session.FeatureWindows}
	_, a, _ := pairWithReady(t, cfg)
	a.dev.fail(deviceError(syscall.EIO))
	if e := a.dev.ready.get(a.peer, a.cfg); e != nil {
		t.Error("an endpoint was taken of a device that has failed")
		a.dev.ready.putBack(e)
	}
}

// No endpoint is made ready where locked memory is limited, where little of the arena is left, or where
// the device ends with its only connection.
func TestNoneReady(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return // if both ends' devices belong to this process, the test cannot show it
	}
	nothingLeft(t)
	cfg := Config{Disable: session.FeatureWindows}.withDefaults()
	unlimited := memlock
	defer func() { memlock = unlimited }()
	memlock = func() int { return 8 << 20 }
	l := listen(t, cfg)
	a, _ := pair(t, l, cfg)
	d := a.dev
	none := func(why string) {
		t.Helper()
		d.ready.refill(d, cfg)
		d.ready.filled()
		if list := readyNumbers(d); len(list) > 0 {
			t.Errorf("%s: %v are ready", why, list)
		}
	}
	none("locked memory is limited")
	memlock = unlimited
	var used []*regcache.Buffer
	for controlArena().Left() >= readyFrom {
		buf, err := controlArena().Get(16 << 20)
		if err != nil {
			t.Fatal(err)
		}
		used = append(used, buf)
	}
	none("the arena has little left")
	for _, buf := range used {
		buf.Put()
	}
	devices.mu.Lock()
	users := d.users
	d.users = 1
	devices.mu.Unlock()
	none("the device has one use")
	devices.mu.Lock()
	d.users = users
	devices.mu.Unlock()
	d.ready.refill(d, cfg)
	awaitReady(t, d)
}

// allReady makes as many endpoints ready as the device has queue pairs left. It does so also if the last
// connection found none, so that endpoints that were being made gave way to it.
func allReady(d *device, cfg Config) {
	d.ready.filled()
	d.ready.full.Store(false)
	d.ready.refill(d, cfg.withDefaults())
	d.ready.filled()
}

// If the device can make no further endpoint, nobody gets an error, and no attempt follows until a
// connection has ended.
func TestReadyUpToTheLimit(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return // only where hwsimRuns gives the device five queue pairs
	}
	nothingLeft(t)
	cfg := Config{Disable: session.FeatureWindows}
	l := listen(t, cfg)
	a, _ := pair(t, l, cfg)
	fifth := func(b *Endpoint) {
		t.Helper()
		a.dev.ready.filled()
		if list := readyNumbers(a.dev); len(list) != 1 || !a.dev.ready.full.Load() {
			t.Errorf("ready are %v, want the fifth queue pair; others are tried: %v", list, !a.dev.ready.full.Load())
		}
		if err := b.Err(); err != nil {
			t.Error(err)
		}
	}
	allReady(a.dev, cfg)
	b, c := pair(t, l, cfg)
	fifth(b)
	b.discard()
	c.discard()
	testenv.Eventually(t, patience, func() error {
		a.dev.mu.Lock()
		defer a.dev.mu.Unlock()
		if n := len(a.dev.endpoints); n > 2 {
			return fmt.Errorf("%d connections' ends", n)
		}
		return nil
	})
	if a.dev.ready.full.Load() {
		t.Error("no others are tried")
	}
	allReady(a.dev, cfg)
	b, _ = pair(t, l, cfg)
	fifth(b)
}

// Ready endpoints that do not suit a connection are destroyed if it needs their resources.
func TestReadyGivesWay(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return // only where hwsimRuns gives the device five queue pairs
	}
	nothingLeft(t)
	cfg := Config{Disable: session.FeatureWindows}
	l := listen(t, cfg)
	a, _ := pair(t, l, cfg)
	allReady(a.dev, cfg)
	if n := len(readyNumbers(a.dev)); n != 3 {
		t.Fatalf("%d are ready, want the third to the fifth queue pair", n)
	}
	other := listen(t, Config{Disable: session.FeatureWindows | session.FeatureRegCache})
	b, c := pair(t, other, other.cfg)
	b.discard()
	c.discard()

	// So are endpoints that are just being made.
	allReady(a.dev, cfg)
	a.dev.ready.full.Store(false)
	a.dev.ready.filling.Lock()
	var making []*Endpoint
	for range readyNumbers(a.dev) {
		making = append(making, a.dev.ready.pick(func(*Endpoint) bool { return true }))
	}
	done := make(chan error)
	go func() {
		b, c, err := connect(other, other.cfg)
		if err == nil {
			b.discard()
			c.discard()
		}
		done <- err
	}()
	testenv.Eventually(t, patience, func() error {
		if !a.dev.ready.full.Load() {
			return errors.New("no connection wants for a queue pair")
		}
		return nil
	})
	for _, e := range making {
		a.dev.ready.putBack(e)
	}
	a.dev.ready.filling.Unlock()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// Endpoints are made ready also if a device's windows cannot be trusted.
func TestReadyWithoutTrust(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return // only where hwsimRuns gives the device windows that do not work
	}
	nothingLeft(t)
	l := listen(t, Config{})
	a, _ := pair(t, l, Config{})
	if !a.dev.mayHaveWindows(Config{}) {
		t.Fatal("the device does not offer windows")
	}
	pair(t, l, Config{})
	awaitReady(t, a.dev)
	ready := readyNumbers(a.dev)
	if b, _ := pair(t, l, Config{}); !slices.Contains(ready, b.q.qp.Num) || b.dom.shared {
		t.Errorf("queue pair %d, in a shared domain: %v; ready were %v", b.q.qp.Num, b.dom.shared, ready)
	}
}

// The end of a device waits while another endpoint is being made ready.
func TestEndWhileRefilling(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return // only where hwsimRuns makes queue pairs slow
	}
	withoutReady(t)
	readyEndpoints = 64 // to make these takes longer than a connection lives
	nothingLeft(t)
	cfg := Config{Disable: session.FeatureWindows}
	refilling := 0
	end := time.Now().Add(patience)
	for i := 0; i < 20 || refilling == 0 && time.Now().Before(end); i++ {
		l := listen(t, cfg)
		a, b, err := connect(l, cfg)
		if err != nil {
			t.Fatal(err)
		}
		a.discard()
		b.discard()
		if a.dev.ready.isFilling() {
			refilling++
		}
		l.Close()
	}
	if refilling == 0 {
		t.Error("no device has ended meanwhile")
	}
}

// Endpoints that were made before windows were trusted are replaced by others in the shared domain.
func TestReadyBehindTheProbe(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return // only where hwsimRuns gives the device windows
	}
	nothingLeft(t)
	l := listen(t, Config{})
	a, _ := pair(t, l, Config{})
	testenv.Eventually(t, patience, func() error {
		if !a.dev.windows.Load() {
			return errors.New("windows have not come on")
		}
		return nil
	})
	a.dev.windows.Store(false)
	pair(t, l, Config{})
	awaitReady(t, a.dev)
	a.dev.windows.Store(true)
	pair(t, l, Config{})
	awaitReady(t, a.dev)
	for _, e := range a.dev.ready.all() {
		if !e.dom.shared {
			t.Errorf("queue pair %d has a domain of its own", e.q.qp.Num)
		}
	}
}

// An endpoint that the device could make only with smaller buffers than wanted suits no connection, and
// is not kept. After a connection that has such buffers itself, none is made ready.
func TestReadyOfOtherSizes(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return
	}
	nothingLeft(t)
	withoutReady(t)
	cfg := Config{Disable: session.FeatureWindows}
	l := listen(t, cfg)
	a, _ := pair(t, l, cfg)
	awaitReady(t, a.dev)
	wanted := a.cfg.withDefaults()
	readyEndpoints = 1
	a.dev.most.registration = wanted.receiveBytes() - 1
	a.dev.ready.filling.Lock()
	a.dev.ready.fill(a.dev, wanted)
	if len(readyNumbers(a.dev)) > 0 {
		t.Errorf("%d are ready", len(readyNumbers(a.dev)))
	}
	a.dev.ready.full.Store(false)
	if b, _ := pair(t, l, cfg); b.cfg.sizes() == wanted.sizes() {
		t.Error("the connection has all that was wanted")
	}
	if a.dev.ready.filled(); a.dev.ready.full.Load() {
		t.Error("one was made, and unmade")
	}
}

// BenchmarkDial makes and closes connections one after the other, on the simulated device with a NIC's
// costs: with and without ready endpoints, at once and after a pause.
func BenchmarkDial(b *testing.B) {
	if testenv.Device() == "" {
		f := hwsim.New(b, "latency_ns=2000")
		child := exec.Command(os.Args[0], "-test.run=^$", "-test.bench=^BenchmarkDial$", "-test.benchtime=200x", "-test.count=3")
		child.Env = f.Env()
		out, err := child.CombinedOutput()
		os.Stdout.Write(out)
		if err != nil {
			b.Fatal(err)
		}
		return
	}
	usual := readyEndpoints
	defer func() { readyEndpoints = usual }()
	for _, n := range []int{0, usual} {
		for _, pause := range []time.Duration{0, 20 * time.Millisecond} {
			b.Run(fmt.Sprintf("%d ready, pause %v", n, pause), func(b *testing.B) {
				readyEndpoints = n
				l := listen(b, Config{})
				var sum time.Duration
				for range b.N {
					time.Sleep(pause)
					began := time.Now()
					x, y, err := connect(l, Config{})
					sum += time.Since(began)
					if err != nil {
						b.Fatal(err)
					}
					x.discard()
					y.discard()
				}
				b.ReportMetric(float64(sum.Microseconds())/float64(b.N), "µs/dial")
			})
		}
	}
}
