package regcache

import (
	"fmt"
	"math/rand/v2"
	"testing"
)

// model is a simple and slow cache: a map of what is cached, of which every entry is searched.
type model struct {
	cached map[uint32]registration
}

// serves returns the key of the cached registration that serves [start, end).
func (m *model) serves(start, end uintptr, access Access) (key uint32, ok bool) {
	for key, r := range m.cached {
		if r.start <= start && end <= r.end && r.access&access == access {
			return key, true
		}
	}
	return 0, false
}

// put replaces everything that r overlaps.
func (m *model) put(key uint32, r registration) {
	for other, o := range m.cached {
		if o.start < r.end && r.start < o.end {
			delete(m.cached, other)
		}
	}
	m.cached[key] = r
}

// The cache is compared with the model: it hits exactly when the model does, with the same registration;
// it holds what the model holds and what is in use; and it stays within its limits.
func TestTheCacheDoesWhatTheModelDoes(t *testing.T) {
	for seed := range uint64(20) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { compareWithModel(t, seed) })
	}
}

const (
	modelBytes   = 6 << 20
	modelEntries = 10
)

// compared is a cache, and the model that it is compared with.
type compared struct {
	t      *testing.T
	random *rand.Rand
	d      *fakeDevice
	c      *Cache
	m      model
	memory []byte
	held   []*Region
	step   int
}

func compareWithModel(t *testing.T, seed uint64) {
	const steps = 2000
	x := &compared{
		t:      t,
		random: rand.New(rand.NewPCG(seed, 2)),
		d:      &fakeDevice{},
		m:      model{cached: make(map[uint32]registration)},
		memory: make([]byte, 4<<20),
	}
	x.c = newCache(t, x.d, Config{Budget: NewBudget(modelBytes, modelEntries)})
	// As the memory is larger than a quarter of the budget, ranges are registered, not whole objects.
	stable, err := Declare(x.memory)
	if err != nil {
		t.Fatal(err)
	}
	for x.step = range steps {
		if len(x.held) > 6 || x.random.IntN(3) == 0 {
			x.release()
		} else {
			x.acquire()
		}
		x.compare()
	}
	for _, r := range x.held {
		release(t, r)
	}
	if err := stable.Withdraw(); err != nil {
		t.Error(err)
	}
	expectEmpty(t, x.d)
}

// release releases one of the regions held, if there is one.
func (x *compared) release() {
	x.t.Helper()
	last := len(x.held) - 1
	if last < 0 {
		return
	}
	i := x.random.IntN(last + 1)
	release(x.t, x.held[i])
	x.held[i] = x.held[last]
	x.held = x.held[:last]
}

// acquire checks that the cache hits exactly when the model does.
func (x *compared) acquire() {
	x.t.Helper()
	size := len(x.memory)
	n := 1 + x.random.IntN(1<<(10+x.random.IntN(12)))
	from := x.random.IntN(size - min(n, size-1))
	b := x.memory[from:min(from+n, size)]
	access := []Access{LocalRead, LocalWrite, BindWindow}[x.random.IntN(3)]
	start := addressOf(b)
	key, hit := x.m.serves(start, start+uintptr(len(b)), access)
	made, promoted := x.d.registrations(), x.c.Stats().Promoted
	r := acquire(x.t, x.c, b, access)
	if hit != (x.d.registrations() == made) {
		x.t.Fatalf("step %d: hit %v, the model's %v", x.step, !hit, hit)
	}
	if hit && key != r.LKey() {
		x.t.Fatalf("step %d: hit of registration %d, the model's %d", x.step, r.LKey(), key)
	}
	if err := x.d.covers(r.LKey(), b, access); err != nil {
		x.t.Fatalf("step %d: %v", x.step, err)
	}
	x.held = append(x.held, r)
	if x.c.Stats().Promoted != promoted {
		x.m.put(r.LKey(), registration{r.start, r.end, r.access})
	}
}

// compare checks that the device has registered what the model holds and what is in use, within the
// limits.
func (x *compared) compare() {
	x.t.Helper()
	for key := range x.m.cached { // removes what was evicted
		if _, live := x.d.live[key]; !live {
			delete(x.m.cached, key)
		}
	}
	live := make(map[uint32]bool)
	for key := range x.m.cached {
		live[key] = true
	}
	for _, r := range x.held {
		live[r.LKey()] = true
	}
	if len(live) != len(x.d.live) {
		x.t.Fatalf("step %d: the device holds %d registrations, the model %d", x.step, len(x.d.live), len(live))
	}
	s := x.c.Stats()
	if s.Bytes > modelBytes || s.Entries > modelEntries || s.Entries != len(x.m.cached) {
		x.t.Fatalf("step %d: %d bytes in %d entries, the model has %d", x.step, s.Bytes, s.Entries, len(x.m.cached))
	}
}
