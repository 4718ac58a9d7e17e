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

// withoutReady has the test's connections make their own endpoints.
func withoutReady(t testing.TB) {
	usual := readyEndpoints
	readyEndpoints = 0
	t.Cleanup(func() { readyEndpoints = usual })
}

// readyNumbers are the numbers of the queue pairs that are ready on a device.
func readyNumbers(d *device) (list []uint32) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, e := range d.ready {
		list = append(list, e.q.qp.Num)
	}
	return list
}

// awaitReady waits until as many as may be are ready on devices.
func awaitReady(t testing.TB, devices ...*device) {
	t.Helper()
	testenv.Eventually(t, patience, func() error {
		for _, d := range devices {
			if n := len(readyNumbers(d)); n != readyEndpoints || d.refilling.Load() {
				return fmt.Errorf("%d are ready on %s", n, d.ctx.Name)
			}
		}
		return nil
	})
}

// shareOf is how many bytes of the control buffers count as a peer's; none: as that of what is ready.
func shareOf(peer netip.Addr) int64 {
	shares.mu.Lock()
	defer shares.mu.Unlock()
	return shares.m[share{controlArena(), peer}]
}

// pairWithReady is a connection whose ends' devices have as many endpoints ready as may be.
func pairWithReady(t *testing.T, cfg Config) (l *listener, a, b *Endpoint) {
	t.Helper()
	l = listen(t, cfg)
	a, b = pair(t, l, cfg)
	pair(t, l, cfg)
	awaitReady(t, a.dev, b.dev)
	return l, a, b
}

// Connections behind the first take endpoints that were made ahead, with their own settings, and
// nothing is left of those that nobody takes.
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
			continue // iWARP has no such way
		}
		t.Run(tt.name, func(t *testing.T) {
			nothingLeft(t)
			l := listen(t, tt.cfg)
			a, b := pair(t, l, tt.cfg) // keeps the dialer's device
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

// What is ready is not for a connection that needs another, nor for a peer that has its share, and
// what has failed is for nobody. Those make their own.
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

	full := share{controlArena(), netip.MustParseAddr("192.0.2.1")}
	all := peerShare * controlArena().Left()
	shares.mu.Lock()
	shares.m[full] = all
	shares.mu.Unlock()
	ready = readyNumbers(a.dev)
	if e := a.dev.takeReady(full.peer, a.cfg); e != nil {
		t.Error("a peer that has its share got one more")
		a.dev.mu.Lock()
		a.dev.ready = append(a.dev.ready, e)
		a.dev.mu.Unlock()
	}
	if now := readyNumbers(a.dev); !slices.Equal(now, ready) {
		t.Errorf("ready are %v, before %v", now, ready)
	}
	full.giveBack(all)

	for _, d := range []*device{a.dev, b.dev} {
		d.mu.Lock()
		list := slices.Clone(d.ready)
		d.mu.Unlock()
		for _, e := range list {
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
	a.dev.fail(deviceError(syscall.EIO))
	if err := c.Err(); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the connection of a device that has failed: %v", err)
	}
}

// A device that has failed has its ready endpoints fail.
func TestReadyOfAFailedDevice(t *testing.T) {
	nothingLeft(t)
	cfg := Config{Disable: session.FeatureWindows}
	_, a, _ := pairWithReady(t, cfg)
	a.dev.fail(deviceError(syscall.EIO))
	if e := a.dev.takeReady(a.peer, a.cfg); e != nil {
		t.Error("an endpoint was taken of a device that has failed")
		a.dev.mu.Lock()
		a.dev.ready = append(a.dev.ready, e)
		a.dev.mu.Unlock()
	}
}

// None is made where locked memory is limited, where the arena has little left, or where the
// device ends with its only connection.
func TestNoneReady(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return // where one process has both ends' devices, it cannot be shown
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
		d.refill(cfg)
		d.refills.Wait()
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
	d.refill(cfg)
	awaitReady(t, d)
}

// Where no more can be made, nobody hears of it, and no more is tried.
func TestReadyUpToTheLimit(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return // which has five queue pairs: hwsimRuns
	}
	nothingLeft(t)
	cfg := Config{Disable: session.FeatureWindows}
	l := listen(t, cfg)
	a, _ := pair(t, l, cfg)
	b, _ := pair(t, l, cfg)
	a.dev.refills.Wait()
	if list := readyNumbers(a.dev); len(list) != 1 || !a.dev.refilling.Load() {
		t.Errorf("ready are %v, want the fifth queue pair; others are tried: %v", list, !a.dev.refilling.Load())
	}
	if err := b.Err(); err != nil {
		t.Error(err)
	}
}

// A device that ends while another is made ready waits for it.
func TestEndWhileRefilling(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return // whose queue pairs take the time: hwsimRuns
	}
	nothingLeft(t)
	cfg := Config{Disable: session.FeatureWindows}
	refilling := 0
	for range 20 {
		l := listen(t, cfg)
		a, b, err := connect(l, cfg)
		if err != nil {
			t.Fatal(err)
		}
		a.discard()
		b.discard()
		if a.dev.refilling.Load() {
			refilling++
		}
		l.Close()
	}
	if refilling == 0 {
		t.Error("no device has ended meanwhile")
	}
}

// None is made before it is known whether connections share a domain: those that do would not take it.
func TestReadyBehindTheProbe(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return // where windows come on: hwsimRuns
	}
	nothingLeft(t)
	l := listen(t, Config{})
	a, _ := pair(t, l, Config{})
	pair(t, l, Config{})
	testenv.Eventually(t, patience, func() error {
		if !a.dev.windows.Load() {
			return errors.New("windows have not come on")
		}
		return nil
	})
	pair(t, l, Config{})
	awaitReady(t, a.dev)
	a.dev.mu.Lock()
	defer a.dev.mu.Unlock()
	for _, e := range a.dev.ready {
		if !e.dom.shared {
			t.Errorf("queue pair %d has a domain of its own", e.q.qp.Num)
		}
	}
}

// What a device has made with smaller buffers than were wanted suits nobody, and is not kept.
func TestReadyOfOtherSizes(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return
	}
	nothingLeft(t)
	withoutReady(t)
	cfg := Config{Disable: session.FeatureWindows}
	a, _ := pair(t, listen(t, cfg), cfg)
	awaitReady(t, a.dev)
	wanted := a.cfg.withDefaults()
	readyEndpoints = 1
	a.dev.most.registration = wanted.receiveBytes() - 1
	if a.dev.makeReady(wanted) || len(readyNumbers(a.dev)) > 0 {
		t.Errorf("%d are ready", len(readyNumbers(a.dev)))
	}
}

// BenchmarkDial has connections made and closed one after the other, on the simulated device with
// a NIC's costs: without ready endpoints and with them, at once and with a pause in between.
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
