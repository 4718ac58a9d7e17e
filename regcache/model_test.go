package regcache

import (
	"fmt"
	"math/rand/v2"
	"testing"
)

// model is a cache written without regard for speed: a plain map of what is cached, which
// is searched completely.
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

// The cache against the model: it hits exactly when the model does, with the
// same registration; what it holds is what the model holds and what is in use;
// and it stays within its limits.
func TestTheCacheDoesWhatTheModelDoes(t *testing.T) {
	for seed := range uint64(20) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { compareWithModel(t, seed) })
	}
}

func compareWithModel(t *testing.T, seed uint64) {
	const (
		size       = 4 << 20
		maxBytes   = 6 << 20
		maxEntries = 10
		steps      = 2000
	)
	random := rand.New(rand.NewPCG(seed, 2))
	d := &fakeDevice{}
	budget := NewBudget(maxBytes, maxEntries)
	c := newCache(t, d, Config{Budget: budget})
	memory := make([]byte, size)
	// Beyond a quarter of the budget, ranges and not whole objects are
	// registered.
	stable, err := Declare(memory)
	if err != nil {
		t.Fatal(err)
	}
	m := &model{cached: make(map[uint32]registration)}
	var held []*Region

	for step := range steps {
		if len(held) > 6 || random.IntN(3) == 0 {
			if last := len(held) - 1; last >= 0 {
				i := random.IntN(last + 1)
				release(t, held[i])
				held[i] = held[last]
				held = held[:last]
			}
		} else {
			n := 1 + random.IntN(1<<(10+random.IntN(12)))
			from := random.IntN(size - min(n, size-1))
			b := memory[from:min(from+n, size)]
			access := []Access{LocalRead, LocalWrite, BindWindow}[random.IntN(3)]
			start := addressOf(b)
			key, hit := m.serves(start, start+uintptr(len(b)), access)
			made, promoted := d.registrations(), c.Stats().Promoted
			r := acquire(t, c, b, access)
			if hit != (d.registrations() == made) {
				t.Fatalf("step %d: hit %v, the model's %v", step, !hit, hit)
			}
			if hit && key != r.LKey() {
				t.Fatalf("step %d: hit of registration %d, the model's %d", step, r.LKey(), key)
			}
			if err := d.covers(r.LKey(), b, access); err != nil {
				t.Fatalf("step %d: %v", step, err)
			}
			held = append(held, r)
			if c.Stats().Promoted != promoted {
				m.put(r.LKey(), registration{r.start, r.end, r.access})
			}
		}

		for key := range m.cached { // what was evicted
			if _, live := d.live[key]; !live {
				delete(m.cached, key)
			}
		}
		live := make(map[uint32]bool)
		for key := range m.cached {
			live[key] = true
		}
		for _, r := range held {
			live[r.LKey()] = true
		}
		if len(live) != len(d.live) {
			t.Fatalf("step %d: the device holds %d registrations, the model %d", step, len(d.live), len(live))
		}
		s := c.Stats()
		if s.Bytes > maxBytes || s.Entries > maxEntries || s.Entries != len(m.cached) {
			t.Fatalf("step %d: %d bytes in %d entries, the model has %d", step, s.Bytes, s.Entries, len(m.cached))
		}
	}
	for _, r := range held {
		release(t, r)
	}
	if err := stable.Withdraw(); err != nil {
		t.Error(err)
	}
	expectEmpty(t, d)
}
