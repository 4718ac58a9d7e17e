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

// user uses caches at random, and checks the regions that it holds.
type user struct {
	t        *testing.T
	random   *rand.Rand
	d        *fakeDevice
	budget   *Budget
	caches   []*Cache
	shared   [][]byte // with the other users
	declared []*Range
}

// step acquires a part of a shared or a new object, and releases it.
func (u *user) step() {
	c := u.caches[u.random.IntN(len(u.caches))]
	b := u.shared[u.random.IntN(len(u.shared))]
	switch u.random.IntN(40) {
	case 0:
		u.budget.SetLimits(int64(1+u.random.IntN(4))<<20, 12)
	case 1:
		c.Stats()
	case 2:
		b = make([]byte, 64<<10)
	case 3:
		if r, err := Declare(b); err == nil {
			u.declared = append(u.declared, r)
		}
	}
	from := u.random.IntN(len(b))
	part := b[from : from+1+u.random.IntN(len(b)-from)]
	access := Access(u.random.IntN(16))
	if u.random.IntN(2) == 0 {
		usedBefore(c, part)
	}
	r, err := c.Acquire(part, access)
	if err != nil {
		if !errors.Is(err, syscall.ENOBUFS) {
			u.t.Error(err)
		}
		return
	}
	if err := u.d.covers(r.LKey(), part, access); err != nil {
		u.t.Error(err)
	}
	runtime.Gosched()
	if err := u.d.covers(r.LKey(), part, access); err != nil {
		u.t.Errorf("while held: %v", err)
	}
	if err := r.Release(); err != nil {
		u.t.Error(err)
	}
}

func (u *user) withdraw() {
	for _, r := range u.declared {
		r.Withdraw()
	}
}

// All operations run concurrently, under the race detector and with checks of the device's records: a
// region that is held is registered, covers the acquired memory, and has its rights.
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
	for seed := range uint64(8) {
		wg.Go(func() {
			u := user{t: t, random: rand.New(rand.NewPCG(seed, 1)), d: d, budget: budget, caches: caches, shared: shared}
			defer u.withdraw()
			for range 1500 {
				u.step()
			}
		})
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
		c := New(d, Config{Budget: budget}) // one for each protection domain
		for _, access := range []Access{LocalRead, LocalWrite, RemoteRead} {
			release(t, acquire(t, c, buffers[n%len(buffers)], access))
		}
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	}
	expectEmpty(t, d)
	if budget.bytes != 0 || budget.entries != 0 || budget.order.Len() != 0 || len(budget.caches) != 0 {
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
