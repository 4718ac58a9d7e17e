package regcache

import (
	"runtime"
	"testing"
	"time"
	"unsafe"
)

func newCache(t testing.TB, r Registrar, config Config) *Cache {
	t.Helper()
	if config.Budget == nil {
		config.Budget = NewBudget(64<<20, 1024)
	}
	c := New(r, config)
	// This runs before the device's own Cleanup. If a region were still cached, and its object died
	// later, it would be deregistered on a closed descriptor, or on the next device with the same
	// number.
	t.Cleanup(func() {
		if err := c.Close(); err != nil && !t.Failed() {
			t.Errorf("%v: the test has not released everything", err)
		}
	})
	return c
}

func acquire(t testing.TB, c *Cache, b []byte, access Access) *Region {
	t.Helper()
	r, err := c.Acquire(b, access)
	if err != nil {
		t.Fatalf("Acquire(%d bytes, %v): %v", len(b), access, err)
	}
	return r
}

// acquireAgain is acquire for memory that was used before, which the cache keeps.
func acquireAgain(t testing.TB, c *Cache, b []byte, access Access) *Region {
	t.Helper()
	usedBefore(c, b)
	return acquire(t, c, b, access)
}

// usedBefore makes the next use of b its second one for the cache.
func usedBefore(c *Cache, b []byte) { c.worthCaching(b, classify(b), 1) }

func release(t testing.TB, r *Region) {
	t.Helper()
	if err := r.Release(); err != nil {
		t.Fatalf("Release: %v", err)
	}
}

// expectRegistrations fails unless the device has registered n times so far.
func expectRegistrations(t testing.TB, d *fakeDevice, n int) {
	t.Helper()
	if made := d.registrations(); made != n {
		t.Errorf("the device registered %d times, want %d", made, n)
	}
}

// expectEmpty fails unless the device holds nothing.
func expectEmpty(t testing.TB, d *fakeDevice) {
	t.Helper()
	if entries, bytes := d.registered(); entries != 0 || bytes != 0 {
		t.Errorf("the device holds %d registrations of %d bytes, want none", entries, bytes)
	}
}

// within waits until another goroutine has done something.
func within(t testing.TB, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !done(); {
		if time.Now().After(deadline) {
			t.Fatal("it did not happen")
		}
		runtime.Gosched()
	}
}

func fill(b []byte, seed byte) {
	for i := range b {
		b[i] = byte(i)*31 + seed
	}
}

// hide returns p in a way that escape analysis does not recognize. It must not call anything, because
// the address is not a pointer meanwhile.
//
//go:nosplit
//go:norace
//go:nocheckptr
func hide(p unsafe.Pointer) unsafe.Pointer {
	x := uintptr(p)
	return *(*unsafe.Pointer)(unsafe.Pointer(&x))
}
