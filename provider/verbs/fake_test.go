//go:build linux && cgo

package verbs

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/session"
)

// fakeVariable names the file with the words that this process shares with the fake.
const fakeVariable = "SAN_TEST_FAKE"

// fakeTests are tests over a fake of rdma-core's libraries, testdata/fake.c. It has one device, moves no
// data, and fails on request. So each call can fail in turn, a device can be removed and come back
// within milliseconds, and the tests choose what completes.
var fakeTests = []struct {
	name string
	test func(*testing.T)
}{
	{"each call fails in turn", testEachCallFails},
	{"each call fails in turn without rdma_cm", testEachCallFailsWithoutCM},
	{"dials without time", testDialsWithoutTime},
	{"device removal", testDeviceRemoval},
	{"without epoll", testWithoutEpoll},
	{"devices do not overlap", testDevicesDoNotOverlap},
	{"closing listener", testClosingListener},
	{"polls of a queue", testPollsOfAQueue},
	{"send room", testSendRoom},
	{"receive buffers", testReceiveBuffers},
	{"no messages", testNoMessages},
	{"end waits for transfers", testEndWaitsForTransfers},
	{"failures end the connection", testFailuresEnd},
	{"end behind disconnect", testEndBehindDisconnect},
	{"unflushed transfers", testUnflushedTransfers},
	{"transfers that are not posted", testTransfersNotPosted},
	{"exposing behind the end", testExposeBehindEnd},
	{"revoking what the device keeps", testRevokeKept},
	{"events end the connection", testEventsEnd},
	{"retire", testRetire},
	{"notices", testNotices},
	{"GIDs in turn", testGIDsInTurn},
	{"half-open connections without rdma_cm", testHalfOpenWithoutCM},
	{"inline limits", testInlineLimits},
	{"inline data refused", testInlineRefused},
	{"no windows", testNoWindows},
	{"locked queues", testLockedQueues},
	{"stale connections", testStaleConnections},
	{"network settings", testNetworkSettings},
	{"another device than the route's", testAnotherDevice},
	{"kept memory", testKeptMemory},
}

// TestOnFake runs each of fakeTests in a process of its own, which finds the fake in place of the
// system's libraries.
func TestOnFake(t *testing.T) {
	if os.Getenv(fakeVariable) != "" { // this is such a process
		for _, tt := range fakeTests {
			t.Run(tt.name, tt.test)
		}
		return
	}
	if testenv.Device() != "" {
		return // this is the lane of real drivers
	}
	dir := t.TempDir()
	buildFake(t, dir)
	shared := filepath.Join(dir, "words")
	for _, tt := range fakeTests {
		t.Run(tt.name, func(t *testing.T) {
			if err := os.WriteFile(shared, make([]byte, fakeWords*8), 0o600); err != nil {
				t.Fatal(err)
			}
			child := exec.Command(os.Args[0], "-test.run=^TestOnFake$/^"+strings.ReplaceAll(tt.name, " ", "_")+"$", "-test.timeout=4m")
			child.Env = append(os.Environ(), fakeVariable+"="+shared, "LD_LIBRARY_PATH="+dir,
				"GORACE=atexit_sleep_ms=10 "+os.Getenv("GORACE")) // the default is a second, which is for reports of other threads
			if out, err := child.CombinedOutput(); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			words, err := os.ReadFile(shared)
			if err != nil {
				t.Fatal(err)
			}
			if binary.NativeEndian.Uint64(words[fakeUses*8:]) == 0 {
				t.Error("the test did not use the fake")
			}
		})
	}
}

// buildFake builds the libraries.
func buildFake(t *testing.T, dir string) {
	t.Helper()
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
}

// Indexes of the words that are shared with the fake, as in testdata/fake.c.
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
	fakeTOS
	fakeAckTimeout
	fakeRetry
	fakeRNRRetry
	fakeUses // how many tests use the fake

	fakeObjects = 32
	fakeQPs     = fakeObjects + 4
	fakeName    = 64
	fakePosted  = 128
	fakeRing    = 256
	fakeWords   = 512
)

var _ [fakeObjects - fakeUses - 1]int // does not compile if the words above overlap the counts of objects

var fakeKinds = [...]string{"protection domains", "memory regions", "completion channels", "completion queues", "queue pairs", "event channels", "ids"}

// fake is the fake library in this process.
type fake struct {
	t     *testing.T
	words *[fakeWords]atomic.Int64
	arena int64 // bytes of control buffers in use at the beginning
	procs int   // goroutines at the beginning

	sockets int
}

// sockets returns how many sockets this process has.
func sockets() (n int) {
	files, _ := filepath.Glob("/proc/self/fd/*")
	for _, file := range files {
		if to, err := os.Readlink(file); err == nil && strings.HasPrefix(to, "socket:") {
			n++
		}
	}
	return n
}

// useFake returns the fake in its initial state. At the end of the test it checks that nothing is left.
func useFake(t *testing.T) *fake {
	t.Helper()
	withoutReady(t) // they would be made at any time, and counted
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
	uses := f.get(fakeUses) + 1
	for i := range fakeObjects {
		f.set(i, 0)
	}
	f.set(fakeUses, uses)
	f.set(fakeCountdown, -1)
	list, err := ibv.Devices()
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range list { // they would come at any time, and be counted
		measured.Store(keyOf(&ibv.Context{Device: d}), func() int { return 0 })
	}
	_, f.arena = controlArena().Bytes()
	f.procs, f.sockets = runtime.NumGoroutine(), sockets()
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

func (f *fake) get(word int) int64 { return f.words[word].Load() }

func (f *fake) set(word int, n int64) { f.words[word].Store(n) }

// order makes the fake remove its device, or bring it back.
func (f *fake) order(n int64) {
	f.t.Helper()
	f.set(fakeOrder, n)
	testenv.Eventually(f.t, patience, func() error {
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
	testenv.Eventually(f.t, patience, func() error {
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
		note(int64(sockets()-f.sockets), "sockets")
		note(lockedQueues.Load(), "locked bytes of queues")
		if left != nil {
			return fmt.Errorf("%s there are left: %s", when, strings.Join(left, ", "))
		}
		return nil
	})
}

// failed names the call that has failed last.
func (f *fake) failed() string {
	name := unsafe.Slice((*byte)(unsafe.Pointer(&f.words[fakeName])), 64)
	s, _, _ := strings.Cut(string(name), "\x00")
	return s
}

func fakeAddr(port int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), uint16(port))
}

// fakeConfigs are the two kinds of protection domain: of each connection, and shared.
var fakeConfigs = []Config{{}, {SharedDomain: true}}

// serveLoopback makes 127.0.0.1 an address of the fake's device.
func serveLoopback(t *testing.T) {
	serveOn(map[string]string{"lo": "fake0"})
	t.Cleanup(func() { serveOn(nil) })
}

// connectOnce makes a listener and a connection, and closes both.
func connectOnce(at netip.AddrPort, cfg Config) error {
	cfg.Disable |= switchedOff()
	l, err := listenAt(at, cfg)
	if err != nil {
		return err
	}
	defer l.Close()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
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
	e, err := Dial(ctx, netip.Addr{}, at, cfg)
	if err != nil {
		return err
	}
	e.discard()
	return nil
}

// connectTwo makes a listener and a connection, which stay until the test ends.
func connectTwo(t *testing.T, at netip.AddrPort) (dialed, accepted *Endpoint, err error) {
	t.Helper()
	cfg := Config{Disable: switchedOff()}
	l, err := listenAt(at, cfg)
	if err != nil {
		return nil, nil, err
	}
	defer l.Close()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if dialed, err = Dial(ctx, netip.Addr{}, at, cfg); err != nil {
		return nil, nil, err
	}
	if accepted, err = accept(l); err != nil {
		dialed.discard()
	}
	return dialed, accepted, err
}

// fakePair makes a connection, and fails the test if it cannot.
func fakePair(t *testing.T, port int, cfg Config) (a, b *Endpoint) {
	t.Helper()
	cfg.Disable |= switchedOff()
	l, err := listenAt(fakeAddr(port), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if a, err = Dial(ctx, netip.Addr{}, fakeAddr(port), cfg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(a.discard)
	if b, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.discard)
	return a, b
}

// complete processes completions, as if one poll had returned them.
func (e *Endpoint) complete(wcs ...ibv.WC) {
	e.q.mu.Lock()
	defer e.q.mu.Unlock()
	e.q.reaping = true
	for i := range wcs {
		e.completedLocked(&wcs[i])
	}
	e.q.reaping = false
	e.q.publishFlushedLocked()
}

// wakes gets the events for which a session is woken.
type wakes chan session.Events

func (w wakes) Wake(ev session.Events) {
	select {
	case w <- ev:
	default:
	}
}

// wakeFunc is a Waker that calls a function.
type wakeFunc func(session.Events)

func (w wakeFunc) Wake(ev session.Events) { w(ev) }
