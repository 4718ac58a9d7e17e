package regcache

import (
	"errors"
	"runtime"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// Registering takes long, and a device may call back, so no lock is held.
func TestTheDeviceIsCalledWithoutALock(t *testing.T) {
	d := &fakeDevice{}
	budget := NewBudget(1<<30, 2)
	c := newCache(t, d, Config{Budget: budget})
	other := make([]byte, 64<<10)
	stable, err := Declare(make([]byte, 64<<10))
	if err != nil {
		t.Fatal(err)
	}
	calls, inside := 0, false
	look := func() {
		calls++
		if inside {
			return
		}
		inside = true
		defer func() { inside = false }()
		c.Stats()
		_ = budget.String()
		usedBefore(c, other)
		if r, err := c.Acquire(other, LocalRead); err == nil {
			release(t, r)
		} else if !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
	}
	d.onRegister = func(int) error { look(); return nil }
	d.onDeregister = func(registration) { look() }
	for range 4 { // each is registered, and evicted
		release(t, acquireAgain(t, c, make([]byte, 64<<10), LocalRead))
	}
	release(t, acquireAgain(t, c, stable.memory, LocalRead))
	if err := stable.Withdraw(); err != nil {
		t.Error(err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if calls < 8 {
		t.Errorf("%d calls of the device", calls)
	}
}

func TestADeviceOutOfMemoryGetsTheUnusedBack(t *testing.T) {
	d := &fakeDevice{limit: 256 << 10}
	c := newCache(t, d, Config{})
	small := make([][]byte, 4)
	for i := range small {
		small[i] = make([]byte, 64<<10)
		release(t, acquireAgain(t, c, small[i], LocalRead))
	}
	large := make([]byte, 200<<10)
	r := acquireAgain(t, c, large, LocalRead)
	if s := c.Stats(); s.Flushes != 1 || s.Evictions != 4 {
		t.Errorf("%d flushes, %d evictions; want 1, 4", s.Flushes, s.Evictions)
	}

	// While that one is in use, nothing can be given back.
	more := make([]byte, 100<<10)
	usedBefore(c, more)
	_, err := c.Acquire(more, LocalRead)
	if !errors.Is(err, syscall.ENOBUFS) {
		t.Errorf("error %v, want ENOBUFS", err)
	}
	if s := c.Stats(); s.Refused == 0 {
		t.Error("the refusal was not counted")
	}
	release(t, r)
	release(t, acquireAgain(t, c, make([]byte, 100<<10), LocalRead))
	runtime.KeepAlive(small)
}

// If one goroutine is giving back a region, another one waits for its room.
func TestARegistrationWaitsForRoomThatIsBeingGivenBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // because Flush alone waits for a second
		d := &fakeDevice{limit: 1 << 20}
		dropping, refused := make(chan struct{}), make(chan struct{})
		d.onDeregister = func(registration) {
			close(dropping) // called once, for the only region
			<-refused
		}
		c := newCache(t, d, Config{})
		release(t, acquireAgain(t, c, make([]byte, 1<<20), LocalRead))
		flushed := make(chan struct{})
		go func() {
			defer close(flushed)
			c.budget.Flush()
		}()
		<-dropping
		var tries atomic.Int32
		d.onRegister = func(int) error {
			if tries.Add(1) == 1 {
				time.AfterFunc(10*time.Millisecond, func() { close(refused) })
			}
			return nil
		}
		b := make([]byte, 256<<10)
		usedBefore(c, b)
		r, err := c.Acquire(b, LocalRead)
		if err != nil {
			t.Fatalf("with nothing in use: %v", err)
		}
		<-flushed
		release(t, r)
		d.onDeregister = nil
	})
}

func TestAFailingDeviceIsReportedAndForgotten(t *testing.T) {
	broken := errors.New("broken")
	d := &fakeDevice{onRegister: func(int) error { return broken }}
	c := newCache(t, d, Config{})
	b := make([]byte, 64<<10)
	usedBefore(c, b)
	if _, err := c.Acquire(b, LocalRead); !errors.Is(err, broken) {
		t.Errorf("error %v, want the device's", err)
	}
	if s := c.Stats(); s.Entries != 0 || s.Bytes != 0 || s.PinnedEntries != 0 || s.Failed == 0 {
		t.Errorf("%+v", s)
	}
	d.onRegister = nil
	release(t, acquireAgain(t, c, b, LocalRead))
}

// A failed registration gives its room in the budget back.
func TestAFailedRegistrationTakesNoRoom(t *testing.T) {
	d := &fakeDevice{onRegister: func(int) error { return syscall.EIO }}
	budget := NewBudget(1<<20, 100)
	c := newCache(t, d, Config{Budget: budget})
	for range 3 {
		b := make([]byte, 64<<10)
		usedBefore(c, b)
		if _, err := c.Acquire(b, LocalRead); !errors.Is(err, syscall.EIO) {
			t.Errorf("Acquire: %v, want EIO", err)
		}
	}
	if budget.bytes != 0 || budget.entries != 0 {
		t.Errorf("%v", budget)
	}
}

// If a device fails to deregister memory, the caller is told: otherwise it would unmap the memory.
func TestADeviceThatKeepsARegistrationIsReported(t *testing.T) {
	d := &fakeDevice{}
	c := New(d, Config{Budget: NewBudget(64<<20, 1024)})
	arena := NewArena(0, 0)
	memory := get(t, arena, 64<<10)
	b := memory.Bytes()
	release(t, acquire(t, c, b, LocalRead))
	memory.Put()
	d.deregisterError = syscall.EBUSY
	if err := arena.Close(); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("Arena.Close: %v, want EBUSY", err)
	}
	b[0]++ // still mapped
	if s := c.Stats(); s.DeregisterFailed != 1 || s.PinnedBytes != defaultSlab {
		t.Errorf("%d not deregistered, %d bytes pinned; want 1, %d", s.DeregisterFailed, s.PinnedBytes, defaultSlab)
	}
	for range 2 {
		if err := c.Close(); !errors.Is(err, syscall.EBUSY) {
			t.Errorf("Cache.Close: %v, want EBUSY", err)
		}
	}
	if len(c.budget.caches) != 0 {
		t.Error("the cache still counts")
	}
}

// A device that hangs does not delay users of another device.
func TestADeviceThatHangsDelaysNoOther(t *testing.T) {
	hanging, healthy := &fakeDevice{}, &fakeDevice{}
	hangs := make(chan struct{})
	hanging.onDeregister = func(registration) { <-hangs }
	budget := NewBudget(64<<20, 1)
	one := newCache(t, hanging, Config{Budget: budget})
	two := newCache(t, healthy, Config{Budget: budget})
	// If something waits for the device nevertheless, this lets it go on, and the test fails.
	late := time.AfterFunc(30*time.Second, func() { close(hangs) })

	a, b := make([]byte, 64<<10), make([]byte, 64<<10)
	release(t, acquireAgain(t, one, a, LocalRead))
	release(t, acquireAgain(t, two, b, LocalRead)) // evicts a
	release(t, acquireAgain(t, one, a, LocalRead)) // evicts b
	release(t, acquireAgain(t, two, b, LocalWrite))
	budget.SetLimits(64<<20, 2)
	release(t, acquireAgain(t, one, a, LocalRead))
	budget.Flush()
	if entries, _ := hanging.registered(); entries != 3 {
		t.Errorf("%d registrations on the device that hangs, want 3", entries)
	}
	if late.Stop() {
		close(hangs)
	}
	runtime.KeepAlive([][]byte{a, b})
}
