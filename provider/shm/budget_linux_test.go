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
