package regcache

import (
	"runtime"
	"sync"
	"testing"
)

func TestADeadObjectIsPruned(t *testing.T) {
	d := &fakeDevice{}
	c := newCache(t, d, Config{})
	for range 20 {
		release(t, acquireAgain(t, c, make([]byte, 64<<10), LocalRead))
	}
	within(t, func() bool {
		runtime.GC()
		entries, _ := d.registered()
		return entries == 0
	})
	s := c.Stats()
	if s.Invalidated[ObjectDied] == 0 || s.Entries != 0 || s.PinnedBytes != 0 {
		t.Errorf("%+v", s)
	}
}

// Go has one goroutine for cleanups per four processors, so no cleanup may wait for a device.
func TestASlowDeviceHoldsUpNoCleanups(t *testing.T) {
	d := &fakeDevice{}
	others := make(chan struct{})
	d.onDeregister = func(registration) { <-others }
	c := newCache(t, d, Config{})
	answer := sync.OnceFunc(func() { close(others) })
	t.Cleanup(answer)
	for died := range uint64(runtime.GOMAXPROCS(0)/4 + 1) {
		release(t, acquireAgain(t, c, make([]byte, 64<<10), LocalRead))
		within(t, func() bool {
			runtime.GC()
			return c.Stats().Invalidated[ObjectDied] > died
		})
	}
	ran := make(chan struct{})
	runtime.AddCleanup(new([1 << 16]byte), func(int) { close(ran) }, 0)
	within(t, func() bool {
		runtime.GC()
		select {
		case <-ran:
			return true
		default:
			return false
		}
	})
	answer()
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	expectEmpty(t, d)
}
