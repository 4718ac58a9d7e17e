package shm

import (
	"math"
	"testing"
)

func TestBudgetFollowsTheMemoryLimit(t *testing.T) {
	for limit, want := range map[int64]int64{math.MaxInt64: defaultBudget, 16 << 30: defaultBudget, 128 << 20: 16 << 20, 0: 0} {
		if got := budgetFor(limit); got != want {
			t.Errorf("%d bytes of %d", got, limit)
		}
	}
}

// Connections that starve may hold as much as rings may have, but those to processes of other users only
// half of it: the rest is for this user's own.
func TestSpareOfOtherUsers(t *testing.T) {
	for dir, part := range map[string]int64{"": 1, t.TempDir(): 2} { // there another container's process may be found
		t.Run(dir, func(t *testing.T) {
			a, b := pair(t, Config{Dir: dir})
			for _, p := range []*peer{a, b} {
				if got := p.Endpoint.(*endpoint).Spare(); got != budget().Most()/part {
					t.Errorf("%d of %d", got, budget().Most())
				}
			}
		})
	}
}
