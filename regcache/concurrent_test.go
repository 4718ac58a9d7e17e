package regcache

import (
	"errors"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
)

// Everything at once, for the race detector and to check the records: a region that is
// held is registered, covers the memory acquired, and has its rights.
func TestAHeldRegionStaysRegisteredUnderConcurrentUse(t *testing.T) {
	d := &fakeDevice{}
	budget := NewBudget(2<<20, 12)
	caches := []*Cache{
		newCache(t, d, Config{Budget: budget}),
		newCache(t, d, Config{Budget: budget}),
		newCache(t, d, Config{Budget: budget, Disabled: true}),
	}
	shared := make([][]byte, 24)
	for i := range shared {
		shared[i] = make([]byte, 16<<10<<(i%4))
	}
	var failures atomic.Int32
	d.onRegister = func(int) error {
		if failures.Add(1)%50 == 0 {
			return syscall.ENOMEM
		}
		return nil
	}
	var wg sync.WaitGroup
	for seed := range 8 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			random := rand.New(rand.NewPCG(uint64(seed), 1))
			for range 1500 {
				c := caches[random.IntN(len(caches))]
				b := shared[random.IntN(len(shared))]
				switch random.IntN(40) {
				case 0:
					budget.SetLimits(int64(1+random.IntN(4))<<20, 12)
				case 1:
					c.Stats()
				case 2:
					b = make([]byte, 64<<10)
				case 3:
					if r, err := Declare(b); err == nil {
						defer r.Withdraw()
					}
				}
				from := random.IntN(len(b))
				part := b[from : from+1+random.IntN(len(b)-from)]
				access := Access(random.IntN(16))
				if random.IntN(2) == 0 {
					usedBefore(c, part)
				}
				r, err := c.Acquire(part, access)
				if err != nil {
					if !errors.Is(err, syscall.ENOBUFS) {
						t.Error(err)
					}
					continue
				}
				if err := d.covers(r.LKey(), part, access); err != nil {
					t.Error(err)
				}
				runtime.Gosched()
				if err := d.covers(r.LKey(), part, access); err != nil {
					t.Errorf("while held: %v", err)
				}
				if err := r.Release(); err != nil {
					t.Error(err)
				}
			}
		}()
	}
	wg.Wait()
	for _, c := range caches {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		if s := c.Stats(); s.PinnedBytes != 0 || s.PinnedEntries != 0 || s.Entries != 0 || s.Bytes != 0 {
			t.Errorf("%+v", s)
		}
	}
	expectEmpty(t, d)
	if budget.bytes != 0 || budget.entries != 0 {
		t.Errorf("budget: %v", budget)
	}
}

func TestManyClosedCachesLeaveNothing(t *testing.T) {
	d := &fakeDevice{}
	budget := NewBudget(8<<20, 64)
	buffers := make([][]byte, 16)
	for i := range buffers {
		buffers[i] = make([]byte, 64<<10)
	}
	const connections = 10_000
	for n := range connections {
		c := New(d, Config{Budget: budget}) // a protection domain each
		for _, access := range []Access{LocalRead, LocalWrite, RemoteRead} {
			release(t, acquire(t, c, buffers[n%len(buffers)], access))
		}
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	}
	expectEmpty(t, d)
	if budget.bytes != 0 || budget.entries != 0 || len(budget.order) != 0 || len(budget.caches) != 0 {
		t.Errorf("budget: %v", budget)
	}
	s := budget.Stats()
	if s.Entries != 0 || s.Bytes != 0 || s.PinnedEntries != 0 || s.PinnedBytes != 0 {
		t.Errorf("left: %+v", s)
	}
	if s.Misses+s.Hits+s.Exposed < 3*connections || s.Registrations != s.Deregistrations || int(s.Registrations) != d.registrations() {
		t.Errorf("what all of them did is not in the budget's account: %+v", s)
	}
}
