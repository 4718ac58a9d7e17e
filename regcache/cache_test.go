package regcache

import (
	"errors"
	"runtime"
	"syscall"
	"testing"
	"time"
	"unsafe"
)

func TestAPartOfARegisteredBufferIsAHit(t *testing.T) {
	d := &fakeDevice{}
	c := newCache(t, d, Config{})
	b := make([]byte, 1<<20)
	release(t, acquireAgain(t, c, b, LocalRead))
	for _, part := range [][]byte{b, b[:1], b[len(b)-1:], b[1000:50_000]} {
		r := acquireAgain(t, c, part, LocalRead)
		if err := d.covers(r.LKey(), part, LocalRead); err != nil {
			t.Error(err)
		}
		release(t, r)
	}
	expectRegistrations(t, d, 1)
	if s := c.Stats(); s.Hits != 4 || s.Misses != 1 || s.Entries != 1 || s.Bytes != 1<<20 {
		t.Errorf("%+v", s)
	}
	runtime.KeepAlive(b)
}

func TestAHitAllocatesNothing(t *testing.T) {
	c := newCache(t, &fakeDevice{}, Config{})
	b := make([]byte, 64<<10)
	release(t, acquireAgain(t, c, b, LocalRead))
	if n := testing.AllocsPerRun(100, func() {
		r, err := c.Acquire(b, LocalRead)
		if err != nil {
			t.Fatal(err)
		}
		r.Release()
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestRightsArePartOfTheMatch(t *testing.T) {
	d := &fakeDevice{}
	c := newCache(t, d, Config{})
	b := make([]byte, 64<<10)
	reading := acquireAgain(t, c, b, LocalRead)
	if err := d.covers(reading.LKey(), b, LocalWrite); err == nil {
		t.Error("a registration for reading can write")
	}
	writing := acquireAgain(t, c, b, LocalWrite)
	if err := d.covers(writing.LKey(), b, LocalWrite); err != nil {
		t.Error(err)
	}
	if err := d.covers(reading.LKey(), b, LocalRead); err != nil {
		t.Errorf("the one in use was taken away: %v", err)
	}
	release(t, reading)
	release(t, writing)
	release(t, acquireAgain(t, c, b, LocalRead)) // the region with more rights serves both
	expectRegistrations(t, d, 2)
	if entries, _ := d.registered(); entries != 1 {
		t.Errorf("%d registrations, want the merged one", entries)
	}
	runtime.KeepAlive(b)
}

func TestABufferUsedOnceIsNotCached(t *testing.T) {
	d := &fakeDevice{}
	c := newCache(t, d, Config{})
	b := make([]byte, 64<<10)
	release(t, acquire(t, c, b, LocalRead))
	expectEmpty(t, d)
	release(t, acquire(t, c, b, LocalRead))
	release(t, acquire(t, c, b, LocalRead))
	release(t, acquire(t, c, b, LocalRead))
	expectRegistrations(t, d, 2)
	if s := c.Stats(); s.Once != 1 || s.Promoted != 1 || s.Hits != 2 {
		t.Errorf("once %d, promoted %d, hits %d; want 1, 1, 2", s.Once, s.Promoted, s.Hits)
	}
	runtime.KeepAlive(b)
}

func TestDisabledRegistersEachTime(t *testing.T) {
	d := &fakeDevice{}
	c := newCache(t, d, Config{Disabled: true})
	b := make([]byte, 64<<10)
	for _, access := range []Access{LocalRead, LocalRead, RemoteRead} {
		release(t, acquireAgain(t, c, b, access))
		expectEmpty(t, d)
	}
	expectRegistrations(t, d, 3)
}

// A registration for one use keeps its memory alive, and counts as in use when the cache is closed.
func TestARegistrationForOneUseIsInUse(t *testing.T) {
	d := &fakeDevice{}
	c := newCache(t, d, Config{Disabled: true})
	freed := make(chan struct{})
	r := func() *Region {
		b := make([]byte, 64<<10)
		runtime.AddCleanup(&b[0], func(freed chan struct{}) { close(freed) }, freed)
		return acquire(t, c, b, LocalWrite)
	}()
	for range 3 {
		runtime.GC()
	}
	select {
	case <-freed:
		t.Error("the memory was freed")
	case <-time.After(20 * time.Millisecond): // cleanups run in a goroutine
	}
	if err := c.Close(); err != ErrInUse {
		t.Errorf("Close: %v, want ErrInUse", err)
	}
	release(t, r)
	expectEmpty(t, d)
}

func TestEmptySlicesAndConstantsAreNotRegistered(t *testing.T) {
	c := newCache(t, &fakeDevice{}, Config{})
	if _, err := c.Acquire(nil, LocalRead); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("Acquire(nil): %v", err)
	}
	constant := "read-only"
	for _, access := range []Access{LocalRead, RemoteRead} {
		_, err := c.Acquire(unsafe.Slice(unsafe.StringData(constant), len(constant)), access)
		if !errors.Is(err, ErrUnknownMemory) {
			t.Errorf("Acquire of a constant: %v", err)
		}
	}
	if s := c.Stats(); s.Unknown != 2 {
		t.Errorf("%d times unknown, want 2", s.Unknown)
	}
}

func TestReleasingTwicePanics(t *testing.T) {
	c := newCache(t, &fakeDevice{}, Config{})
	r := acquire(t, c, make([]byte, 5000), LocalRead)
	release(t, r)
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
	}()
	r.Release()
}

func TestAfterCloseNothingIsRegistered(t *testing.T) {
	d := &fakeDevice{}
	c := newCache(t, d, Config{})
	b, used := make([]byte, 64<<10), make([]byte, 64<<10)
	release(t, acquireAgain(t, c, b, LocalRead))
	r := acquireAgain(t, c, used, LocalRead)
	if err := c.Close(); !errors.Is(err, ErrInUse) {
		t.Errorf("Close: %v, want ErrInUse", err)
	}
	if entries, _ := d.registered(); entries != 1 {
		t.Errorf("%d registrations, want the one in use", entries)
	}
	for _, access := range []Access{LocalRead, RemoteRead} {
		if _, err := c.Acquire(b, access); !errors.Is(err, ErrClosed) {
			t.Errorf("Acquire: %v, want ErrClosed", err)
		}
	}
	release(t, r)
	if err := c.Close(); err != nil {
		t.Errorf("Close again: %v", err)
	}
	expectEmpty(t, d)
}
