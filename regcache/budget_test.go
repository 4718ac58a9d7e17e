package regcache

import (
	"errors"
	"os"
	"runtime"
	"strings"
	"syscall"
	"testing"
)

func TestTheLeastRecentlyUsedIsEvicted(t *testing.T) {
	d := &fakeDevice{}
	c := newCache(t, d, Config{Budget: NewBudget(1<<30, 3)})
	buffers := make([][]byte, 4)
	for i := range buffers {
		buffers[i] = make([]byte, 64<<10)
	}
	for _, i := range []int{0, 1, 2, 0} {
		release(t, acquireAgain(t, c, buffers[i], LocalRead))
	}
	release(t, acquireAgain(t, c, buffers[3], LocalRead)) // takes the place of buffer 1
	expectRegistrations(t, d, 4)
	for _, i := range []int{2, 0, 3} {
		release(t, acquireAgain(t, c, buffers[i], LocalRead))
	}
	expectRegistrations(t, d, 4)
	release(t, acquireAgain(t, c, buffers[1], LocalRead))
	expectRegistrations(t, d, 5)
	runtime.KeepAlive(buffers)
}

func TestARegionInUseIsNotEvicted(t *testing.T) {
	d := &fakeDevice{}
	c := newCache(t, d, Config{Budget: NewBudget(128<<10, 100)})
	first, second, third := make([]byte, 64<<10), make([]byte, 64<<10), make([]byte, 64<<10)
	// 64 KiB are more than a quarter of the budget, so whole objects are not registered, but two of them
	// fill the budget.
	a := acquireAgain(t, c, first, LocalRead)
	b := acquireAgain(t, c, second, LocalRead)
	beside := acquireAgain(t, c, third, LocalRead)
	if s := c.Stats(); s.Full != 1 || s.Evictions != 0 || s.Entries != 2 {
		t.Errorf("full %d, evicted %d, entries %d; want 1, 0, 2", s.Full, s.Evictions, s.Entries)
	}
	for _, r := range []*Region{a, b, beside} {
		release(t, r)
	}
	if s := c.Stats(); s.PinnedBytes != 128<<10 {
		t.Errorf("%d bytes pinned after release, want the budget's", s.PinnedBytes)
	}
	runtime.KeepAlive([][]byte{first, second, third})
}

// However many regions are in use or were used recently, eviction finds all others.
func TestEvictionFindsEverythingThatIsNotInUse(t *testing.T) {
	for held := range 9 {
		d := &fakeDevice{}
		budget := NewBudget(64<<20, 1024)
		c := newCache(t, d, Config{Budget: budget})
		var buffers [][]byte
		var regions []*Region
		for range 2 * held {
			b := make([]byte, 64<<10)
			buffers = append(buffers, b)
			r := acquireAgain(t, c, b, LocalRead)
			if len(regions) < held {
				regions = append(regions, r)
			} else {
				release(t, r)
			}
		}
		for _, b := range buffers {
			release(t, acquireAgain(t, c, b, LocalRead))
		}
		if s := c.Stats(); s.IdleBytes != int64(held)*64<<10 || s.Bytes != 2*s.IdleBytes {
			t.Errorf("%d in use: %d bytes idle of %d", held, s.IdleBytes, s.Bytes)
		}
		budget.SetLimits(0, 0)
		if s := c.Stats(); s.Entries != held || s.IdleBytes != 0 {
			t.Errorf("%d in use: %d stay, %d bytes of them idle", held, s.Entries, s.IdleBytes)
		}
		for _, r := range regions {
			release(t, r)
		}
		runtime.KeepAlive(buffers)
	}
}

func TestCachesShareTheBudget(t *testing.T) {
	d := &fakeDevice{}
	budget := NewBudget(1<<30, 2)
	one := newCache(t, d, Config{Budget: budget})
	two := newCache(t, d, Config{Budget: budget})
	a, b, x := make([]byte, 64<<10), make([]byte, 64<<10), make([]byte, 64<<10)
	release(t, acquireAgain(t, one, a, LocalRead))
	release(t, acquireAgain(t, one, b, LocalRead))
	release(t, acquireAgain(t, two, x, LocalRead))
	release(t, acquireAgain(t, two, x, LocalRead))
	if n1, n2 := one.Stats(), two.Stats(); n1.Entries != 1 || n1.Evictions != 1 || n2.Entries != 1 {
		t.Errorf("entries %d and %d, evicted %d; want 1, 1, 1", n1.Entries, n2.Entries, n1.Evictions)
	}
	if s := budget.Stats(); s.Hits != 1 || s.Misses != 3 || s.Evictions != 1 || s.Entries != 2 || s.Bytes != 128<<10 {
		t.Errorf("both together: %+v", s)
	}
	budget.SetLimits(1<<30, 1)
	if n1, n2 := one.Stats(), two.Stats(); n1.Entries+n2.Entries != 1 {
		t.Errorf("entries %d and %d after the limit was lowered to 1", n1.Entries, n2.Entries)
	}
	used := acquireAgain(t, two, x, LocalRead)
	budget.Flush()
	if entries, _ := d.registered(); entries != 1 {
		t.Errorf("%d registrations after Flush, want the one in use", entries)
	}
	release(t, used)
	budget.SetLimits(0, 0)
	expectEmpty(t, d)
	if s := budget.String(); !strings.Contains(s, "0 registrations") {
		t.Errorf("budget: %s", s)
	}
	runtime.KeepAlive([][]byte{a, b, x})
}

// Registrations count in whole pages, as in RLIMIT_MEMLOCK.
func TestRegistrationsCountWholePages(t *testing.T) {
	d := &fakeDevice{}
	c := newCache(t, d, Config{})
	page := os.Getpagesize()
	b := make([]byte, 1<<20)
	r := acquireAgain(t, c, b[page-1:][:page+2], RemoteRead) // once for exactly these bytes, and once to pin the pages
	want := int64(3*page) + c.Stats().Bytes
	if s := c.Stats(); s.Bytes%int64(page) != 0 || s.PinnedBytes != want {
		t.Errorf("%d bytes cached, %d pinned, want whole pages and %d", s.Bytes, s.PinnedBytes, want)
	}
	release(t, r)
	runtime.KeepAlive(b)
}

func TestMemoryBeyondMemlockIsRefusedAndEvictsNothing(t *testing.T) {
	d := &fakeDevice{}
	budget := NewBudget(32<<10, 10)
	budget.memlock = 64 << 10
	c := newCache(t, d, Config{Budget: budget})
	small := make([]byte, 4<<10)
	release(t, acquireAgain(t, c, small, LocalRead))
	large := make([]byte, 100<<10)
	usedBefore(c, large)
	if _, err := c.Acquire(large, LocalRead); !errors.Is(err, syscall.ENOBUFS) {
		t.Errorf("error %v, want ENOBUFS", err)
	}
	release(t, acquireAgain(t, c, small, LocalRead))
	expectRegistrations(t, d, 1) // what was cached is still cached
}
