//go:build linux && cgo

package verbs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/regcache"
	"github.com/sanconn/san/session"
)

// What connects and ends connections, over libraries that are not rdma-core's:
// testdata/fake.c has one device, no data, and fails where it is told to. So each call
// can fail in turn, and a device can go and come back in milliseconds, on any machine.

// fakeVariable names the file of words that this process shares with the fake.
const fakeVariable = "SAN_TEST_FAKE"

var onAFake = []struct {
	name string
	test func(*testing.T)
}{
	{"faults", fakeFaults},
	{"faults without rdma_cm", fakeFaultsWithoutCM},
	{"hurry", fakeHurry},
	{"removal", fakeRemoval},
	{"without epoll", fakeWithoutEpoll},
	{"one device", fakeDevicesDoNotOverlap},
	{"closing listener", fakeClosingListener},
	{"polls", fakePollsOfAQueue},
	{"send room", fakeSendRoom},
	{"receive buffers", fakeReceiveBuffers},
	{"no messages", fakeNoMessages},
	{"ends", fakeEnds},
	{"unflushed transfers", testUnflushedTransfers},
	{"notices", fakeNotices},
	{"groups", fakeGroups},
	{"without rdma_cm", fakeGIDsInTurn},
	{"half open without rdma_cm", fakeHalfOpen},
	{"inline", fakeInlineLimits},
	{"inline refused", fakeInlineRefused},
	{"no windows", fakeNoWindows},
	{"locked queues", fakeLockedQueues},
	{"stale connections", fakeStaleConnections},
	{"kept memory", fakeKeptMemory},
}

// TestOnAFake runs the tests of this file in a process of their own, which finds the
// fake where the system's libraries would be.
func TestOnAFake(t *testing.T) {
	if os.Getenv(fakeVariable) != "" { // that process
		for _, tt := range onAFake {
			t.Run(tt.name, tt.test)
		}
		return
	}
	if testenv.Device() != "" {
		return // the lane of real drivers
	}
	dir := t.TempDir()
	cc := os.Getenv("CC")
	if cc == "" {
		cc = "cc"
	}
	library := filepath.Join(dir, "libibverbs.so.1")
	build := exec.Command(cc, "-O1", "-shared", "-fPIC", "-o", library, "testdata/fake.c", "-Wl,--version-script=testdata/fake.map", "-lpthread")
	build.Env = append(os.Environ(), "LC_ALL=C")
	out, err := build.CombinedOutput()
	if errors.Is(err, exec.ErrNotFound) || bytes.Contains(out, []byte(".h: No such file")) {
		testenv.Missing(t, fmt.Sprintf("a C compiler, libibverbs-dev and librdmacm-dev: %v\n%s", err, out))
	}
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if err := os.Link(library, filepath.Join(dir, "librdmacm.so.1")); err != nil {
		t.Fatal(err)
	}
	shared := filepath.Join(dir, "words")
	if err := os.WriteFile(shared, make([]byte, fakeWords*8), 0o600); err != nil {
		t.Fatal(err)
	}
	child := exec.Command(os.Args[0], "-test.run=^TestOnAFake$", "-test.v", "-test.timeout=2m")
	child.Env = append(os.Environ(), fakeVariable+"="+shared, "LD_LIBRARY_PATH="+dir)
	out, err = child.CombinedOutput()
	if err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	if n := bytes.Count(out, []byte("--- PASS: TestOnAFake/")); n != len(onAFake) {
		t.Errorf("%d tests ran, want %d\n%s", n, len(onAFake), out)
	}
}

// The words that the fake shares, as testdata/fake.c has them.
const (
	fakeCountdown = iota
	fakeErrno
	fakeAll
	fakeHits
	fakeOrder
	fakeRemoved
	fakeUnder
	fakeOverlaps
	fakeNoEpoll
	fakeSRQs
	fakeSlow
	fakePolls
	fakeCompletions
	fakeCompleted
	fakeRecvs
	fakeGIDs
	fakeForeign
	fakeUsed
	fakeOpcode
	fakeBroken
	fakeNotifies
	fakeInline
	fakeVendor
	fakeStale
	fakeKeeps

	fakeObjects = 32
	fakeQPs     = fakeObjects + 4
	fakeName    = 64
	fakePosted  = 128
	fakeRing    = 256
	fakeWords   = 512
)

var _ [fakeObjects - fakeKeeps - 1]int // there is room for the words before those

var fakeKinds = [...]string{"protection domains", "memory regions", "completion channels", "completion queues", "queue pairs", "shared receive queues", "event channels", "ids"}

// fake is the library under this process.
type fake struct {
	t     *testing.T
	words *[fakeWords]atomic.Int64
	arena int64 // of control buffers, used at the beginning
	procs int   // goroutines then
}

// useFake gives the fake, as new, and looks at the end of the test for what is left.
func useFake(t *testing.T) *fake {
	t.Helper()
	fd, err := syscall.Open(os.Getenv(fakeVariable), syscall.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(fd)
	b, err := syscall.Mmap(fd, 0, fakeWords*8, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	f := &fake{t: t, words: (*[fakeWords]atomic.Int64)(unsafe.Pointer(unsafe.SliceData(b)))}
	for i := range fakeObjects {
		f.set(i, 0)
	}
	f.set(fakeCountdown, -1)
	_, f.arena = controlArena().Bytes()
	f.procs = runtime.NumGoroutine()
	t.Cleanup(func() {
		f.set(fakeCountdown, -1)
		f.set(fakeAll, 0)
		f.empty("at the end")
		if n := f.get(fakeUnder); n != 0 {
			t.Errorf("%d times a context or a channel was closed under its objects", n)
		}
	})
	return f
}

func (f *fake) get(word int) int64    { return f.words[word].Load() }
func (f *fake) set(word int, n int64) { f.words[word].Store(n) }

// order has the fake remove its device, or bring it back.
func (f *fake) order(n int64) {
	f.t.Helper()
	f.set(fakeOrder, n)
	testenv.Eventually(f.t, time.Second, func() error {
		if f.get(fakeOrder) != 0 {
			return errors.New("the fake does not obey")
		}
		return nil
	})
}

const (
	fakeRemove = 1
	fakeReturn = 2
)

// empty waits until nothing is left of what tests have made.
func (f *fake) empty(when string) {
	f.t.Helper()
	testenv.Eventually(f.t, 5*time.Second, func() error {
		var left []string
		note := func(n int64, what string) {
			if n != 0 {
				left = append(left, fmt.Sprintf("%d %s", n, what))
			}
		}
		for i, what := range fakeKinds {
			note(f.get(fakeObjects+i), what)
		}
		hub.mu.Lock()
		note(int64(hub.users), "uses of the event channel")
		hub.mu.Unlock()
		devices.mu.Lock()
		note(int64(len(devices.m)), "devices")
		devices.mu.Unlock()
		_, used := controlArena().Bytes()
		note(used-f.arena, "bytes of control buffers")
		note(max(0, int64(runtime.NumGoroutine()-f.procs)), "goroutines")
		if left != nil {
			return fmt.Errorf("%s there are left: %s", when, strings.Join(left, ", "))
		}
		return nil
	})
}

func fakeAddr(port int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), uint16(port))
}

// fakeConfigs are the ways of having receive buffers.
var fakeConfigs = []Config{{}, {SharedDomain: true, SRQFrom: 1}}

// Each call of the libraries fails in turn, alone or with all after it, while a listener
// is made, connected to and closed: an error or a connection, and nothing is left.
func fakeFaults(t *testing.T) {
	f := useFake(t)
	f.set(fakeSRQs, 16)
	port, hits, want := 20_000, 0, 0
	for i, cfg := range fakeConfigs {
		for _, errno := range []syscall.Errno{syscall.ENOMEM, syscall.EIO}[i:] { // with shared queues an end takes 0.1 s
			want += 2 * 20
			hits += f.eachFault(errno, func() error { port++; return connectOnce(fakeAddr(port), cfg) })
		}
	}
	if hits < want {
		t.Errorf("%d calls failed, want %d at least", hits, want)
	}
}

// … also where they connect without rdma_cm. What is short at either end is said to be,
// and nothing else is.
func fakeFaultsWithoutCM(t *testing.T) {
	f := useFake(t)
	f.set(fakeGIDs, 1)
	f.set(fakeForeign, 0)
	serveLoopback(t)
	cfg := Config{WithoutCM: true}
	for _, errno := range []syscall.Errno{syscall.ENOMEM, syscall.EIO} {
		hits := f.eachFault(errno, func() error {
			err := connectOnce(fakeAddr(int(unusedPort(t, cfg.withDefaults()))), cfg)
			if f.get(fakeHits) > 0 && err != nil && (reasonOf(err) == session.ReasonResources) != (errno == syscall.ENOMEM) {
				t.Errorf("%v of %s: %v", errno, f.failed(), err)
			}
			return err
		})
		if hits < 2*20 {
			t.Errorf("%d calls failed", hits)
		}
	}
}

// eachFault connects as often as calls of the libraries can fail with errno: each alone,
// and each with all after it. It counts them.
func (f *fake) eachFault(errno syscall.Errno, connect func() error) (hits int) {
	f.t.Helper()
	for _, all := range []int64{0, 1} {
		for n := int64(0); ; n++ {
			f.set(fakeErrno, int64(errno))
			f.set(fakeAll, all)
			f.set(fakeHits, 0)
			f.set(fakeCountdown, n)
			err := connect()
			hit := f.get(fakeHits) > 0
			f.set(fakeCountdown, -1)
			f.set(fakeHits, 0)
			f.empty(fmt.Sprintf("%v of call %d (%s), all after it: %v; %v:", errno, n, f.failed(), all == 1, err))
			if !hit {
				if err != nil {
					f.t.Errorf("with no fault: %v", err)
				}
				break
			}
			hits++
		}
	}
	return hits
}

// serveLoopback has 127.0.0.1 belong to the fake's device.
func serveLoopback(t *testing.T) {
	r := &rdmaDevices
	set := func(names map[string]string) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.names, r.at = names, time.Now().Add(time.Hour)
	}
	set(map[string]string{"lo": "fake0"})
	t.Cleanup(func() { set(nil) })
}

// failed names the call that failed last.
func (f *fake) failed() string {
	name := unsafe.Slice((*byte)(unsafe.Pointer(&f.words[fakeName])), 64)
	s, _, _ := strings.Cut(string(name), "\x00")
	return s
}

// connectOnce makes a listener and a connection, and ends both.
func connectOnce(at netip.AddrPort, cfg Config) error {
	l, err := Listen(at, cfg)
	if err != nil {
		return err
	}
	defer l.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	accepted := make(chan *Endpoint, 1)
	go func() {
		defer close(accepted)
		if e, err := l.Accept(); err == nil {
			accepted <- e
		}
	}()
	defer func() {
		l.Close()
		if e := <-accepted; e != nil {
			e.discard()
		}
	}()
	e, err := Dial(ctx, netip.AddrPort{}, at, cfg)
	if err != nil {
		return err
	}
	e.discard()
	return nil
}

// Listeners come and go under dials that have less time than a dial takes, while events
// are slow. One dial has all the time it wants, and comes through: so what the others
// lack is time.
func fakeHurry(t *testing.T) {
	const enough = 20 * time.Second
	dial := func(at netip.AddrPort, cfg Config, limit time.Duration) (time.Duration, error) {
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		defer cancel()
		began := time.Now()
		e, err := Dial(ctx, netip.AddrPort{}, at, cfg)
		took := time.Since(began)
		if err == nil {
			e.discard()
		}
		return took, err
	}
	for i, cfg := range fakeConfigs {
		f := useFake(t)
		f.set(fakeSRQs, 16)
		f.set(fakeSlow, 1)
		at := fakeAddr(30_000)
		l, err := Listen(at, cfg)
		if err != nil {
			t.Fatal(err)
		}
		whole, err := dial(at, cfg, enough)
		l.Close()
		if err != nil {
			t.Fatalf("with nobody beside it: %v", err)
		}
		var all sync.WaitGroup
		for g := range 4 {
			all.Go(func() {
				for i := range []int{60, 15}[i] {
					at := fakeAddr(30_001 + 1000*g + i)
					l, err := Listen(at, cfg)
					if err != nil {
						t.Error(err)
						return
					}
					var dials sync.WaitGroup
					for _, limit := range []time.Duration{whole / 20, whole / 2, whole} {
						dials.Go(func() { dial(at, cfg, limit) })
					}
					if i%2 == 0 {
						dials.Go(func() {
							if _, err := dial(at, cfg, enough); err != nil {
								t.Errorf("with all the time it wants: %v", err)
							}
						})
						dials.Wait()
					}
					l.Close()
					dials.Wait()
				}
			})
		}
		all.Wait()
	}
}

// The device goes and comes back under connections: all end, the listener listens on it
// again, and its context is not closed before the last object that was made with it.
func fakeRemoval(t *testing.T) {
	const rounds = 15
	f := useFake(t)
	at := fakeAddr(40_000)
	l, err := Listen(at, Config{})
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	all.Go(func() {
		for {
			e, err := l.Accept()
			if err != nil {
				return
			}
			all.Go(func() {
				ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
				defer cancel()
				if err := e.q.await(ctx, func() bool { return false }); ctx.Err() != nil {
					t.Errorf("the connection does not end: %v", err)
				}
				e.discard()
			})
		}
	})
	var over atomic.Bool
	var connected atomic.Int64
	for g := range 4 {
		all.Go(func() {
			for i := 0; !over.Load(); i++ {
				ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
				e, err := Dial(ctx, netip.AddrPort{}, at, Config{})
				cancel()
				if err != nil {
					runtime.Gosched()
					continue
				}
				connected.Add(1)
				for range (i + g) % 20 {
					runtime.Gosched()
				}
				e.discard()
			}
		})
	}
	for round := range rounds {
		before := connected.Load()
		testenv.Eventually(t, 20*time.Second, func() error {
			if connected.Load() < before+3 {
				return fmt.Errorf("round %d: nobody connects", round)
			}
			return nil
		})
		f.order(fakeRemove)
		testenv.Eventually(t, 5*time.Second, func() error {
			if addrs := l.Addrs(); len(addrs) != 0 {
				return fmt.Errorf("round %d: it listens on %v of a device that has gone", round, addrs)
			}
			return nil
		})
		f.order(fakeReturn)
	}
	over.Store(true)
	l.Close()
	all.Wait()
}

// Who cannot be told of events gets an error, and does not wait for them.
func fakeWithoutEpoll(t *testing.T) {
	f := useFake(t)
	f.set(fakeNoEpoll, 1)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	began := time.Now()
	_, err := Dial(ctx, netip.AddrPort{}, fakeAddr(41_000), Config{})
	if err == nil || !strings.Contains(err.Error(), "max_user_watches") || time.Since(began) > 5*time.Second {
		t.Errorf("%v after %v", err, time.Since(began))
	}
}

// Of one context there is one device at a time, however fast the last connection's end
// and the next one's beginning follow each other.
func fakeDevicesDoNotOverlap(t *testing.T) {
	f := useFake(t)
	at := fakeAddr(42_000)
	var all sync.WaitGroup
	for range 2 {
		all.Go(func() {
			for range 500 { // nobody listens: the device is used and let go
				ctx, cancel := context.WithTimeout(context.Background(), time.Second)
				if _, err := Dial(ctx, netip.AddrPort{}, at, Config{}); !errors.Is(err, syscall.ECONNREFUSED) && reasonOf(err) != session.ReasonNoListener {
					t.Error(err)
				}
				cancel()
			}
		})
	}
	all.Wait()
	if n := f.get(fakeOverlaps); n != 0 {
		t.Errorf("%d times there were two", n)
	}
}

// Who asks a listener that is being closed is told so: another may have its port by TCP.
func fakeClosingListener(t *testing.T) {
	useFake(t)
	at := fakeAddr(43_000)
	l, err := Listen(at, Config{})
	if err != nil {
		t.Fatal(err)
	}
	closing := func(is bool) {
		l.mu.Lock()
		l.closed = is
		l.mu.Unlock()
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	closing(true) // and still listens
	_, err = Dial(ctx, netip.AddrPort{}, at, Config{})
	if reasonOf(err) != session.ReasonNoListener || !strings.Contains(err.Error(), "closing") {
		t.Errorf("%v (%v)", err, reasonOf(err))
	}
	closing(false)
	l.Close()
}

// A look at a queue takes no more than it has room for, and looks again no more often
// than it was told, and not once it has something.
func fakePollsOfAQueue(t *testing.T) {
	f := useFake(t)
	dev, err := ibv.Open("fake0")
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	cq, err := dev.CreateCQ(16, nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer cq.Close()
	for _, tt := range []struct{ room, times, there, got, polls int }{
		{5, 1, 0, 0, 1},
		{5, 8, 0, 0, 8},
		{5, 8, 3, 3, 1},
		{5, 8, 5, 5, 1},
		{5, 8, 12, 5, 1},
		{40, 8, 39, 39, 0},
		{40, 8, 100, 40, 0},
		{0, 8, 1, 0, 0},
	} {
		f.set(fakePolls, 0)
		f.set(fakeCompletions, int64(tt.there))
		wcs := make([]ibv.WC, tt.room+1)
		wcs[tt.room].ID = 4711
		n, err := cq.Spin(wcs[:tt.room], tt.times)
		if n != tt.got || err != nil || f.get(fakeCompletions) != int64(tt.there-tt.got) {
			t.Errorf("%+v: %d, %v; %d are left", tt, n, err, f.get(fakeCompletions))
		}
		if polls := f.get(fakePolls); tt.polls != 0 && polls != int64(tt.polls) {
			t.Errorf("%+v: %d polls", tt, polls)
		}
		if wcs[tt.room].ID != 4711 {
			t.Errorf("%+v: it writes behind the room", tt)
		}
	}
	f.set(fakeCompletions, 0)
}

// Without rdma_cm an end takes the GID of its address whose interface is here and has
// that address, and another where the device says that it is not this process's. Where
// all are like that, both ends say so.
func fakeGIDsInTurn(t *testing.T) {
	f := useFake(t)
	f.set(fakeGIDs, 3)
	serveLoopback(t)
	cfg := Config{WithoutCM: true}
	for _, tt := range []struct{ foreign, used int64 }{{0, 1 << 2}, {1 << 2, 1 << 0}, {1<<2 | 1<<0, 1 << 1}, {1<<3 - 1, 0}} {
		f.set(fakeForeign, tt.foreign)
		f.set(fakeUsed, 0)
		err := connectOnce(fakeAddr(int(unusedPort(t, cfg.withDefaults()))), cfg)
		if tt.used == 0 && reasonOf(err) != session.ReasonUnreachable || tt.used != 0 && err != nil {
			t.Errorf("%b are not ours: %v", tt.foreign, err)
		}
		if used := f.get(fakeUsed); used != tt.used {
			t.Errorf("%b are not ours: queue pairs have %b, want %b", tt.foreign, used, tt.used)
		}
	}

	a, err := attach(fakeAddr(0).Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer a.dev.release()
	err = a.inTurn(func(ibv.GIDEntry) error { return syscall.EINVAL })
	if text := fmt.Sprint(err); reasonOf(err) != session.ReasonUnreachable || !strings.Contains(text, "GID ::ffff:127.0.0.1 ") || !strings.Contains(text, " of lo:") {
		t.Errorf("no GID is ours: %v", err)
	}
	if at, err := a.dev.loopback(); err != nil || len(at.gids) != 3 || at.gids[0].Index != 2 {
		t.Errorf("the probe's GIDs: %+v, %v", at.gids, err)
	}
}

// Who shows a card and is never ready does not keep a backlog from others until its time
// is up.
func fakeHalfOpen(t *testing.T) {
	f := useFake(t)
	f.set(fakeGIDs, 1)
	f.set(fakeForeign, 0)
	serveLoopback(t)
	cfg := Config{WithoutCM: true, Backlog: 2}
	at := fakeAddr(int(unusedPort(t, cfg.withDefaults())))
	l, err := Listen(at, cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for range cfg.Backlog {
		c, err := net.Dial("tcp", netip.AddrPortFrom(at.Addr(), l.cfg.iwarpPort(at.Port())).String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		mine := connParams{privateData: privateData{version: protocolVersion}, mtu: 3, served: 1}
		mine.peer = ibv.QPPeer{QPNum: 17, GID: at.Addr().As16()}
		if _, err := c.Write(mine.bytes()); err != nil {
			t.Fatal(err)
		}
		if _, err := readParams(c); err != nil {
			t.Fatal(err)
		}
	}
	expectPlaces(t, l)
}

// Messages go inline as far as the device says that it takes that, and not at all where
// its library does not.
func fakeInlineLimits(t *testing.T) {
	f := useFake(t)
	for i, tt := range []struct{ vendor, granted, want int64 }{{0, 0, maxInline}, {0, 32, 32}, {0, -1, 0}, {manaVendor, 0, 0}} {
		f.set(fakeVendor, tt.vendor)
		f.set(fakeInline, tt.granted)
		x, y, err := connectTwo(t, fakeAddr(44_000+i))
		if err != nil {
			t.Fatal(err)
		}
		if x.send.inline != int(tt.want) {
			t.Errorf("a device that grants %d: %d bytes go inline, want %d", tt.granted, x.send.inline, tt.want)
		}
		for n := 16; n <= session.MaxControl; n *= 2 {
			if room := x.ReserveControl(n); room != nil {
				x.CommitControl(n)
			}
		}
		if err := x.Err(); err != nil {
			t.Errorf("a device that grants %d: %v", tt.granted, err)
		}
		x.discard()
		y.discard()
	}
}

// A device whose library refuses much inline data without an errno (bnxt_re) is asked for
// less by the next connection, which then costs nothing of what the caches hold.
func fakeInlineRefused(t *testing.T) {
	f := useFake(t)
	f.set(fakeVendor, 0x14e4)
	f.set(fakeInline, 96)
	x, y, err := connectTwo(t, fakeAddr(47_000))
	if err != nil {
		t.Fatal(err)
	}
	defer x.discard()
	defer y.discard()
	cached := make([]byte, 1<<20)
	putInCache(t, x, cached)
	idle := regcache.DefaultBudget().Stats().IdleBytes
	dev, err := useDevice(x.dev.ctx)
	if err != nil {
		t.Fatal(err)
	}
	e, err := newEndpoint(dev, nil, Config{}.withDefaults(), false)
	if err != nil {
		t.Fatal(err)
	}
	defer e.discard()
	for _, e := range []*Endpoint{x, y, e} {
		if e.send.inline != 64 {
			t.Errorf("%d bytes go inline, want 64", e.send.inline)
		}
	}
	if left := regcache.DefaultBudget().Stats().IdleBytes; idle == 0 || left != idle {
		t.Errorf("%d bytes were cached that nobody used, and %d are left", idle, left)
	}
}

// A device without memory windows, whatever it promises, is not asked again.
func fakeNoWindows(t *testing.T) {
	f := useFake(t)
	f.set(fakeGIDs, 1)
	dev, err := openDevice("fake0")
	if err != nil {
		t.Fatal(err)
	}
	defer dev.release()
	dev.probeWindows()
	defer func() {
		probed.mu.Lock()
		delete(probed.m, dev.probeKey())
		probed.mu.Unlock()
	}()
	probed.mu.Lock()
	answer, known := probed.m[dev.probeKey()]
	probed.mu.Unlock()
	if !known || answer.trusted || !answer.until.IsZero() {
		t.Errorf("known %v, trusted %v, until %v", known, answer.trusted, answer.until)
	}
}

// connectTwo makes a connection, and its listener for as long.
func connectTwo(t *testing.T, at netip.AddrPort) (dialed, accepted *Endpoint, err error) {
	t.Helper()
	l, err := Listen(at, Config{})
	if err != nil {
		return nil, nil, err
	}
	defer l.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if dialed, err = Dial(ctx, netip.AddrPort{}, at, Config{}); err != nil {
		return nil, nil, err
	}
	if accepted, err = accept(l); err != nil {
		dialed.discard()
	}
	return dialed, accepted, err
}

// putInCache registers a buffer and leaves it to the cache: from its second use on.
func putInCache(t *testing.T, e *Endpoint, buf []byte) {
	t.Helper()
	for range 2 {
		r, err := e.dom.cache.Acquire(buf, 0)
		if err != nil {
			t.Fatal(err)
		}
		r.Release()
	}
}

// Queues may be locked memory as well: what the caches hold and do not use makes room for
// them, before buffers are made smaller or a connection is refused.
func fakeLockedQueues(t *testing.T) {
	f := useFake(t)
	x, y, err := connectTwo(t, fakeAddr(45_000))
	if err != nil {
		t.Fatal(err)
	}
	defer x.discard()
	defer y.discard()
	cached := make([]byte, 1<<20)
	f.set(fakeErrno, int64(syscall.ENOMEM))
	seen := false
	for n := int64(0); ; n++ {
		putInCache(t, x, cached)
		dev, err := useDevice(x.dev.ctx)
		if err != nil {
			t.Fatal(err)
		}
		f.set(fakeHits, 0)
		f.set(fakeCountdown, n)
		e, err := newEndpoint(dev, nil, Config{}.withDefaults(), false)
		hit := f.get(fakeHits) > 0
		f.set(fakeCountdown, -1)
		if e != nil {
			if hit && f.failed() == "ibv_create_cq" {
				seen = true
				if idle := regcache.DefaultBudget().Stats().IdleBytes; e.cfg.BufferSize != defaultBufferSize || idle != 0 {
					t.Errorf("without memory for a completion queue the buffers have %d bytes, and %d are cached that nobody uses", e.cfg.BufferSize, idle)
				}
			}
			e.discard()
		} else if hit && f.failed() == "ibv_create_cq" {
			t.Error(err)
		}
		if !hit {
			break
		}
	}
	if !seen {
		t.Error("no completion queue was refused")
	}
}

// A queue pair's number that the peer has a connection of, from before this host came up
// again, costs an attempt and not the connection.
func fakeStaleConnections(t *testing.T) {
	f := useFake(t)
	f.set(fakeStale, dialTries-1)
	if err := connectOnce(fakeAddr(46_000), Config{}); err != nil {
		t.Error(err)
	}
	f.set(fakeStale, dialTries)
	if err := connectOnce(fakeAddr(46_001), Config{}); err != errStale {
		t.Errorf("%d in turn: %v", dialTries, err)
	}
}

// Control buffers that a device keeps are no other connection's.
func fakeKeptMemory(t *testing.T) {
	f := useFake(t)
	x, y, err := connectTwo(t, fakeAddr(47_000))
	if err != nil {
		t.Fatal(err)
	}
	_, used := controlArena().Bytes()
	f.set(fakeKeeps, 1)
	x.discard()
	y.discard()
	f.set(fakeKeeps, 0)
	const memoryRegions = fakeObjects + 1
	if n := f.get(memoryRegions); n != 4 {
		t.Errorf("the device has kept %d memory regions, want two of each end", n)
	}
	if _, now := controlArena().Bytes(); now != used {
		t.Errorf("%d bytes of them are for others", used-now)
	}
	f.arena = used // for good
	f.set(memoryRegions, 0)
}
