//go:build linux && cgo

package verbs

import (
	"net/netip"
	"syscall"
	"testing"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/regcache"
	"github.com/sanconn/san/session"
)

// A poll of a queue takes no more completions than it has room for, polls no more often than it should,
// and stops once it has something.
func testPollsOfAQueue(t *testing.T) {
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

// Messages go inline up to the size that the device grants, and not at all if its library ignores the
// flag.
func testInlineLimits(t *testing.T) {
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

// If a device's library refuses much inline data without an errno (bnxt_re), the queue pair is made with
// less. The caches do not give up registrations because of that.
func testInlineRefused(t *testing.T) {
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
	keeps := !without(session.FeatureRegCache)
	idle := regcache.DefaultBudget().Stats().IdleBytes
	dev, err := useDevice(x.dev.ctx, x.cfg)
	if err != nil {
		t.Fatal(err)
	}
	e, err := newEndpoint(dev, nil, netip.Addr{}, Config{}.withDefaults(), false, func(*ibv.QP) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	defer e.discard()
	for _, e := range []*Endpoint{x, y, e} {
		if e.send.inline != 64 {
			t.Errorf("%d bytes go inline, want 64", e.send.inline)
		}
	}
	if left := regcache.DefaultBudget().Stats().IdleBytes; (idle > 0) != keeps || left != idle {
		t.Errorf("%d bytes were cached that nobody used, and %d are left", idle, left)
	}
}

// A device that has no memory windows, although its flags claim them, is not tried again.
func testNoWindows(t *testing.T) {
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
		delete(probed.m, keyOf(dev.ctx))
		probed.mu.Unlock()
	}()
	probed.mu.Lock()
	answer, known := probed.m[keyOf(dev.ctx)]
	probed.mu.Unlock()
	if !known || answer.trusted || !answer.until.IsZero() {
		t.Errorf("known %v, trusted %v, until %v", known, answer.trusted, answer.until)
	}
}

// putInCache makes the cache register a buffer and keep it, which it does at the second use.
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

// Queues may also need locked memory. If it is used up, the caches first give up registrations that
// nobody uses. Only then are buffers made smaller, or a connection refused.
func testLockedQueues(t *testing.T) {
	f := useFake(t)
	x, y, err := connectTwo(t, fakeAddr(45_000))
	if err != nil {
		t.Fatal(err)
	}
	defer x.discard()
	defer y.discard()
	cached := make([]byte, 1<<20)
	for _, errno := range []syscall.Errno{syscall.ENOMEM, syscall.EAGAIN} { // EAGAIN: the rdma cgroup's limit
		f.set(fakeErrno, int64(errno))
		lockQueues(t, f, x, cached)
	}
}

func lockQueues(t *testing.T, f *fake, x *Endpoint, cached []byte) {
	seen := false
	for n := int64(0); ; n++ {
		putInCache(t, x, cached)
		dev, err := useDevice(x.dev.ctx, x.cfg)
		if err != nil {
			t.Fatal(err)
		}
		f.set(fakeHits, 0)
		f.set(fakeCountdown, n)
		e, err := newEndpoint(dev, nil, netip.Addr{}, Config{}.withDefaults(), false, func(*ibv.QP) error { return nil })
		hit := f.get(fakeHits) > 0
		f.set(fakeCountdown, -1)
		if e != nil {
			if hit && f.failed() == "ibv_create_cq" {
				seen = true
				if idle := regcache.DefaultBudget().Stats().IdleBytes; e.cfg.bufferSize != defaultBufferSize || idle != 0 {
					t.Errorf("without memory for a completion queue the buffers have %d bytes, and %d are cached that nobody uses", e.cfg.bufferSize, idle)
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

// Control buffers whose registration a device fails to remove are not used for another connection.
func testKeptMemory(t *testing.T) {
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
	f.arena = used // they are lost for good
	f.set(memoryRegions, 0)
}
