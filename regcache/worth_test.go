package regcache

import (
	"errors"
	"runtime"
	"syscall"
	"testing"
	"unsafe"
)

func worth(c *Cache, b []byte, access Access) bool {
	worth, _ := c.Worth(b, access, 1)
	return worth
}

// Memory that may change its pages unnoticed is never registered. Worth returns an error for it, other
// than for memory that had better be copied.
func TestWorthOfUnknownMemory(t *testing.T) {
	c := newCache(t, &fakeDevice{}, Config{})
	constant := "read-only"
	if worth, err := c.Worth(unsafe.Slice(unsafe.StringData(constant), len(constant)), LocalRead, 1); worth || err != ErrUnknownMemory {
		t.Errorf("%v, %v", worth, err)
	}
	if _, err := c.Worth(make([]byte, 4096), LocalRead, 1); err != nil {
		t.Error(err)
	}
}

// Memory is worth its registration once it is used again, or if it is registered. The object counts, not
// its address.
func TestMemoryIsWorthItWhenItComesAgain(t *testing.T) {
	c := newCache(t, &fakeDevice{}, Config{})
	b := make([]byte, 64<<10)
	for i, want := range []bool{false, true, true} {
		if worth(c, b, LocalRead) != want {
			t.Errorf("use %d: worth it: %v", i+1, !want)
		}
	}
	release(t, acquire(t, c, b, LocalRead))
	if s := c.Stats(); s.Promoted != 1 || s.Once != 0 {
		t.Errorf("it was not kept: %+v", s)
	}
	before := c.Stats().Misses
	if !worth(c, b[1000:50_000], LocalRead) || worth(c, nil, LocalRead) {
		t.Error("of a registered buffer a part is not worth it, or nothing is")
	}
	if s := c.Stats(); s.Hits != 0 || s.Misses != before {
		t.Errorf("looking is counted: %+v", s)
	}
	runtime.KeepAlive(b)
	d := newCache(t, &fakeDevice{}, Config{})
	if worth(d, b, LocalRead) {
		t.Error("another cache's use counts")
	}
	runtime.KeepAlive(b)
}

// If registering costs as much as several copies, memory is copied that many times before.
func TestMemoryIsWorthItWhenItsCopiesHaveCostAsMuch(t *testing.T) {
	c := newCache(t, &fakeDevice{}, Config{})
	b := make([]byte, 64<<10)
	const copies = 3
	for i := range 2 * copies {
		if got, _ := c.Worth(b, LocalRead, copies); got != (i >= copies) {
			t.Errorf("use %d: worth it: %v", i+1, got)
		}
	}
	release(t, acquire(t, c, b, LocalRead))
	if s := c.Stats(); s.Promoted != 1 || s.Once != 0 {
		t.Errorf("it was not kept: %+v", s)
	}
	runtime.KeepAlive(b)
}

// Buffers that are used in turn are each recognized when they are used again, even if they share a set
// of the table.
func TestMemoryIsWorthItBesideOtherOfItsSet(t *testing.T) {
	c := newCache(t, &fakeDevice{}, Config{})
	large := make([]byte, 64<<20) // the first 8 KiB are left out: the next 4 KiB would count as a part of the first page (heapMemory)
	var buffers [][]byte
	for rest := large[8<<10:]; len(buffers) < seenWays; rest = rest[4<<10:] {
		b := rest[:4<<10]
		if len(buffers) == 0 || setOf(c.useOf(b, c.classify(b))) == setOf(c.useOf(buffers[0], c.classify(buffers[0]))) {
			buffers = append(buffers, b)
		}
	}
	const copies = 3
	for i := range 2 * copies {
		for k, b := range buffers {
			if got, _ := c.Worth(b, LocalRead, copies); got != (i >= copies) {
				t.Errorf("use %d of buffer %d: worth it: %v", i+1, k, got)
			}
		}
	}
	runtime.KeepAlive(large)
}

// After an eviction, memory is copied again before it is registered again, and so is memory that does
// not fit. So buffers that are too many or too large are not registered at each use.
func TestMoreMemoryThanTheBudgetIsMostlyCopied(t *testing.T) {
	const copies, room, rounds = 3, 16, 40
	for _, tt := range []struct {
		buffers, size int
		declared      bool
	}{
		{room, 64 << 10, false}, {room + 1, 64 << 10, false}, {room + 4, 64 << 10, false}, {3 * room, 64 << 10, false}, {1, 4 << 20, false},
		{room, 64 << 10, true}, {room + 4, 64 << 10, true}, {3 * room, 64 << 10, true}, {1, 4 << 20, true},
	} {
		d := &fakeDevice{}
		c := newCache(t, d, Config{Budget: NewBudget(room*64<<10, 1024)})
		buffers := make([][]byte, tt.buffers)
		for i := range buffers {
			buffers[i] = make([]byte, tt.size)
			if tt.declared {
				stable, err := Declare(buffers[i])
				if err != nil {
					t.Fatal(err)
				}
				defer stable.Withdraw()
			}
		}
		copied := 0
		for range rounds {
			for _, b := range buffers {
				if yes, err := c.Worth(b, LocalRead, copies); err != nil {
					t.Fatal(err)
				} else if yes {
					release(t, acquire(t, c, b, LocalRead))
				} else {
					copied++
				}
			}
		}
		n := d.registrations()
		free := 0 // the first registration of each
		if tt.declared {
			free = tt.buffers
		}
		if (n-free)*copies > copied {
			t.Errorf("%+v: %d registrations for %d copies", tt, n, copied)
		}
		if n == 0 || tt.buffers == room && (n > room || tt.declared && copied > 0) {
			t.Errorf("%+v: %d registrations", tt, n)
		}
		runtime.KeepAlive(buffers)
	}
}

// Each attempt with memory that the device refuses costs the process all idle registrations. So there
// are few attempts, and Worth returns the reason.
func TestWhatTheDeviceRefusesIsSeldomTried(t *testing.T) {
	stable, err := Declare(make([]byte, 64<<10))
	if err != nil {
		t.Fatal(err)
	}
	defer stable.Withdraw()
	for name, b := range map[string][]byte{"heap": make([]byte, 64<<10), "declared": stable.memory} {
		full := true
		d := &fakeDevice{onRegister: func(int) error {
			if full {
				return syscall.ENOMEM
			}
			return nil
		}}
		c := newCache(t, d, Config{})
		tries, told := 0, 0
		use := func() {
			worth, err := c.Worth(b, LocalRead, 2)
			switch {
			case worth:
				tries++
				if r, err := c.Acquire(b, LocalRead); err == nil {
					release(t, r)
				} else if !errors.Is(err, syscall.ENOBUFS) {
					t.Fatal(err)
				}
			case err == syscall.ENOBUFS:
				told++
			case err != nil:
				t.Fatal(err)
			}
		}
		for range refusedUses {
			use()
		}
		if s := c.Stats(); tries != 1 || s.Flushes > 2 || told < refusedUses-8 {
			t.Errorf("%s: %d tries, %d flushes, ENOBUFS %d times of %d", name, tries, s.Flushes, told, refusedUses)
		}
		full = false
		for range 16 {
			use()
		}
		if s := c.Stats(); s.Promoted != 1 {
			t.Errorf("%s: not registered now that the device takes it: %+v", name, s)
		}
		runtime.KeepAlive(b)
	}
}

// The same applies to a program that acquires it nevertheless, as verbs does if a Threshold is set.
func TestAcquireSeldomTriesWhatTheDeviceRefuses(t *testing.T) {
	for _, access := range []Access{LocalRead, RemoteRead} {
		full := true
		d := &fakeDevice{onRegister: func(int) error {
			if full {
				return syscall.ENOMEM
			}
			return nil
		}}
		c := newCache(t, d, Config{})
		b := make([]byte, 64<<10)
		for range refusedUses {
			if _, err := c.Acquire(b, access); !errors.Is(err, syscall.ENOBUFS) {
				t.Fatal(err)
			}
		}
		if s := c.Stats(); s.Flushes > 4 {
			t.Errorf("%v: %d flushes in %d uses", access, s.Flushes, refusedUses)
		}
		full = false
		for range 16 {
			if r, err := c.Acquire(b, access); err == nil {
				release(t, r)
			}
		}
		if s := c.Stats(); s.Promoted != 1 {
			t.Errorf("%v: not registered now that the device takes it: %+v", access, s)
		}
		runtime.KeepAlive(b)
	}
}

func TestNothingIsWorthItWithoutACache(t *testing.T) {
	c := newCache(t, &fakeDevice{}, Config{Disabled: true})
	b := make([]byte, 64<<10)
	for range 3 {
		if worth(c, b, LocalRead) {
			t.Error("a cache that keeps nothing finds memory worth it")
		}
	}
	runtime.KeepAlive(b)
}

// kept makes buffers escape to the heap.
var kept []byte

// The allocator uses addresses again. That does not count as a second use.
func TestANewObjectAtAnOldAddressIsNew(t *testing.T) {
	c := newCache(t, &fakeDevice{}, Config{})
	addresses, again := map[uintptr]bool{}, 0
	for i := 0; i < 10_000 && again < 20; i++ {
		kept = make([]byte, 1<<20)
		a := addressOf(kept)
		if addresses[a] {
			again++
		}
		addresses[a] = true
		if worth(c, kept, LocalRead) {
			t.Fatalf("a new object is taken for the one before at its address; %d new ones at old addresses", again)
		}
		kept = nil
		runtime.GC()
	}
	if again < 20 {
		t.Errorf("%d addresses came again", again)
	}
}
