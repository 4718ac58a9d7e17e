//go:build linux && cgo

package verbs

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/regcache"
	"github.com/sanconn/san/session"
	"github.com/sanconn/san/test/hwsim"
)

// Tests of what the result of the probe of a device's windows changes, and when, on the simulated
// device, which enforces windows.

// largeWrite is the shortest length from which offers may pay.
const largeWrite = defaultThreshold

// random returns a new buffer of n random bytes.
func random(n int) []byte {
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{1}).Read(b)
	return b
}

// writeLarge writes sent to the peer, which reads it. It returns how many bytes were taken by RDMA from
// the program's own memory, and how many by RDMA in total.
func writeLarge(t *testing.T, a, b *session.Session, sent []byte) (direct, moved uint64) {
	t.Helper()
	before := a.Stats()
	carry(t, a, b, sent, make([]byte, len(sent)))
	after := a.Stats()
	return after.DirectBytesSent - before.DirectBytesSent, after.OfferedBytesSent - before.OfferedBytesSent
}

// carry writes sent at a, in one Write, and reads it into got at b.
func carry(t *testing.T, a, b *session.Session, sent, got []byte) {
	t.Helper()
	wrote := make(chan error, 1)
	go func() {
		_, err := a.Write(sent)
		wrote <- err
	}()
	_, err := io.ReadFull(readerFunc(b.Read), got)
	if err = errors.Join(err, <-wrote); err != nil || !bytes.Equal(got, sent) {
		t.Fatalf("%v; right bytes: %v", err, bytes.Equal(got, sent))
	}
}

// awaitProbed waits until the probe has found that a device's windows can be trusted, and its costs are
// measured.
func awaitProbed(t *testing.T, d *device) {
	t.Helper()
	testenv.Eventually(t, patience, func() error {
		if !d.windows.Load() {
			return errors.New("windows are not trusted")
		}
		return nil
	})
	awaitMeasured(t, d)
}

// awaitMeasured waits until the cost of registering is measured, and returns whether the simulated
// device is set to make it expensive. If it is not, it counts as one copy from then on, whatever a busy
// machine has measured.
func awaitMeasured(t *testing.T, d *device) (costly bool) {
	t.Helper()
	testenv.Eventually(t, patience, func() error {
		if d.costs.copies.Load() == 0 {
			return errors.New("nobody has measured what registering costs")
		}
		return nil
	})
	if costly = strings.Contains(os.Getenv("HWSIM"), "reg_ns="); !costly {
		d.costs.copies.Store(1)
	}
	return costly
}

// expectDirect checks that a Write goes from the program's own memory, except for the part that goes
// with its offer, when its buffer is used again, and that a Write from a new buffer does not. Once in
// thousands of times the use of a buffer is forgotten, because another buffer is counted in the same
// place.
func expectDirect(t *testing.T, a, b *session.Session, n int) {
	t.Helper()
	var direct [3]uint64
	for range 3 {
		sent := random(n)
		for i := range direct {
			direct[i], _ = writeLarge(t, a, b, sent)
		}
		if direct[0] > 0 {
			t.Errorf("%d bytes of the first Write of %d left its own memory by RDMA", direct[0], n)
		}
		if direct[1] > 0 {
			break
		}
	}
	for _, d := range direct[1:] {
		if d < uint64(n)*9/10 {
			t.Errorf("%d bytes of a Write of %d left its own memory by RDMA", d, n)
		}
	}
}

// expectBoxed checks that no Write goes from the program's own memory, and that at last the send buffer
// is used.
func expectBoxed(t *testing.T, a, b *session.Session, n int) {
	t.Helper()
	var all uint64
	sent := random(n)
	for range 4 {
		direct, moved := writeLarge(t, a, b, sent)
		if direct != 0 {
			t.Errorf("%d bytes of a Write of %d left its own memory by RDMA", direct, n)
		}
		all += moved
	}
	if all == 0 {
		t.Error("no byte went by RDMA")
	}
}

// The first connection of a process sends large Writes from the program's memory as soon as the probe of
// the device has ended.
func TestFirstLargeWrites(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return // windows are not used on rxe and siw
	}
	x, y, err := connect(listen(t, Config{}), Config{})
	if err != nil {
		t.Fatal(err)
	}
	a, b := negotiate(t, x, y, session.Config{})
	sent := random(largeWrite)
	testenv.Eventually(t, patience, func() error {
		if direct, _ := writeLarge(t, a, b, sent); direct == 0 {
			return errors.New("Writes do not leave the program's own memory")
		}
		return nil
	})
	awaitProbed(t, x.dev) // until then the peer gets registrations; from then on the uses of a buffer are counted anew
	for range 10 {
		expectDirect(t, a, b, largeWrite)
		expectDirect(t, b, a, largeWrite)
	}
}

// If windows are switched off, or the device has none, each offer of a Write's own memory needs a
// registration for the peer. If that costs no more than the copy that it saves, such Writes are offered;
// otherwise they go through the send buffer, whatever their size.
func TestLargeWritesWithoutWindows(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return
	}
	cfg := Config{Disable: session.FeatureWindows}
	_, lacks := forgetAnswer(t)
	if lacks {
		cfg.Disable = 0
	}
	x, y, err := connect(listen(t, cfg), cfg)
	if err != nil {
		t.Fatal(err)
	}
	x.dev.probeWindows() // once more, if it was probed before
	if x.dev.windows.Load() == lacks {
		t.Fatalf("windows are trusted: %v", lacks)
	}
	if x.dom.shared || y.dom.shared {
		t.Error("they are in the shared domain")
	}
	a, b := negotiate(t, x, y, session.Config{})
	costly := awaitMeasured(t, x.dev)
	if costly == x.dev.costs.registersLikeCopies() {
		t.Fatalf("a registration costs %d copies", x.dev.costs.copies.Load())
	}
	for _, n := range []int{largeWrite, 4 * largeWrite} {
		if costly {
			expectBoxed(t, a, b, n)
		} else {
			expectDirect(t, a, b, n)
		}
	}
}

// forgetAnswer makes the process forget the result of the probe. lacks reports whether the device has no
// windows.
func forgetAnswer(t *testing.T) (key string, lacks bool) {
	t.Helper()
	cable(t)
	ctx, err := ibv.Open(hwsim.Device)
	if err != nil {
		t.Fatal(err)
	}
	defer ctx.Close()
	key = keyOf(ctx)
	probed.mu.Lock()
	delete(probed.m, key)
	probed.mu.Unlock()
	pd, err := ctx.AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	defer pd.Close()
	mw, err := pd.AllocMW()
	if err == nil {
		mw.Close()
	}
	return key, err != nil
}

// An existing connection uses windows once the probe of the device has ended; connections that are made
// from then on share a domain.
func TestWindowsComeOn(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return
	}
	nothingLeft(t)
	key, _ := forgetAnswer(t)
	probed.mu.Lock()
	probed.m[key] = probeAnswer{until: time.Now().Add(time.Hour)} // inconclusive, so nobody probes for an hour
	probed.mu.Unlock()
	measured.Store(key, func() int { return 0 }) // nor does anybody measure
	defer measured.Delete(key)
	l := listen(t, Config{})
	x, y, err := connect(l, Config{})
	if err != nil {
		t.Fatal(err)
	}
	a, b := negotiate(t, x, y, session.Config{})
	expectBoxed(t, a, b, largeWrite)

	forgetAnswer(t)
	x.dev.probeWindows()
	returns := map[*Endpoint]*returnCount{x: countReturns(x), y: countReturns(y)}
	for range 4 {
		expectDirect(t, a, b, largeWrite)
		expectDirect(t, b, a, largeWrite)
	}
	for _, e := range []*Endpoint{x, y} {
		if n := len(e.mem.windows.all); n == 0 || e.dom.shared {
			t.Errorf("%d windows, in a shared domain: %v", n, e.dom.shared)
		}
		if returns[e].n.Load() == 0 {
			t.Error("no window is invalidated by the peer's ReadDone")
		}
		if n := int(e.q.qp.Cap.SendWR); n < maxSends+ownMessages+maxReads+maxWrites+2*maxWindows {
			t.Errorf("%d work requests have room", n)
		}
	}
	if v, w := pair(t, l, Config{}); !v.dom.shared || v.dom != w.dom {
		t.Error("the next connection has a domain of its own")
	}
}

// The windows of a listener's devices are probed before anybody connects.
func TestListenerProbes(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return
	}
	key, _ := forgetAnswer(t)
	listen(t, Config{})
	testenv.Eventually(t, patience, func() error {
		probed.mu.Lock()
		defer probed.mu.Unlock()
		if !probed.m[key].trusted {
			return errors.New("the device's windows are not trusted")
		}
		return nil
	})
}

// If windows are trusted, memory is registered once for all connections of a device. It is deregistered
// after the last connection that has used it has closed, even if others stay (rule R5), but not before a
// next one had time to come.
func TestTrustedWindowsShareRegistrations(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return
	}
	nothingLeft(t)
	l := listen(t, Config{})
	crowd(t, l, 1)[0].dev.probeWindows()
	other, _ := pair(t, l, Config{})
	mem, err := unix.Mmap(-1, 0, largeWrite, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(mem)
	stable, err := regcache.Declare(mem)
	if err != nil {
		t.Fatal(err)
	}
	defer stable.Withdraw()
	before := other.dom.cache.Stats()
	expect := func(when string, registered int) {
		t.Helper()
		st := other.dom.cache.Stats()
		if n := int(st.Registrations - before.Registrations); n != registered {
			t.Errorf("%s: registered %d times, want %d", when, n, registered)
		}
	}
	use := func() *Endpoint {
		_, e := pair(t, l, Config{})
		if e.dom != other.dom {
			t.Fatal("it is not in the shared domain")
		}
		for range 2 {
			d, err := e.mem.Expose(mem, session.RemoteRead)
			if err != nil {
				t.Fatal(err)
			}
			e.mem.Revoke(d)
		}
		return e
	}
	first, second := use(), use()
	expect("used by two", 1)
	first.discard()
	third := use()
	expect("one of them has closed", 1)
	closing := time.Now()
	second.discard()
	third.discard()
	fourth := use()
	if time.Since(closing) < time.Second {
		expect("all have just closed", 1)
	}
	fourth.discard()
	testenv.Eventually(t, patience, func() error {
		if n := other.dom.cache.Stats().Entries - before.Entries; n != 0 {
			return fmt.Errorf("all have closed: %d registrations of the buffer", n)
		}
		return nil
	})
	again := other.dom.cache.Stats().Registrations
	use()
	if n := other.dom.cache.Stats().Registrations - again; n != 1 {
		t.Errorf("all had closed: registered %d times, want 1", n)
	}
}

// returnCount counts messages that have invalidated a window, in the completions of an endpoint.
type returnCount struct {
	completer
	n atomic.Int32
}

func countReturns(e *Endpoint) *returnCount {
	e.q.mu.Lock()
	defer e.q.mu.Unlock()
	c := &returnCount{completer: e.q.user}
	e.q.user = c
	return c
}

func (c *returnCount) completedLocked(wc *ibv.WC) {
	if wc.ID&kindMask == kindRecv && wc.Flags&ibv.WCWithInv != 0 {
		c.n.Add(1)
	}
	c.completer.completedLocked(wc)
}

// If copies are fast, only Writes that are so long that they would sleep are offered, unless more of the
// arena is in use than the caches hold.
func TestWhereCopiesAreFast(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return // windows are not used on rxe and siw
	}
	x, y, err := connect(listen(t, Config{}), Config{})
	if err != nil {
		t.Fatal(err)
	}
	awaitProbed(t, x.dev)
	x.dev.costs.copying.Store(int64(fastCopies))
	a, b := negotiate(t, x, y, session.Config{})
	for _, n := range []int{largeWrite, 4 * largeWrite} {
		expectBoxed(t, a, b, n)
	}
	expectDirect(t, a, b, 8*largeWrite)
	arena := regcache.DefaultArena()
	for used := int64(0); used <= cachesHold; _, used = arena.Bytes() {
		buffer, err := arena.Get(4 << 20)
		if err != nil {
			t.Fatal(err)
		}
		defer buffer.Put()
	}
	expectDirect(t, a, b, largeWrite)
}
