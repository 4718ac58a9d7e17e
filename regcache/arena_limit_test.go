package regcache

import (
	"errors"
	"math"
	"syscall"
	"testing"
)

// SetArenaLimit raises the limit of the process's arena, and with it the budget of its caches, unless
// the program has set limits of its own.
func TestSetArenaLimit(t *testing.T) {
	a, b := DefaultArena(), DefaultBudget()
	was := a.limit()
	if was < min(defaultArenaBytes, b.limit()/memlockShare) {
		t.Errorf("an arena of %d bytes, beside caches of %d", was, b.limit())
	}
	t.Cleanup(func() {
		b.usual = true
		SetArenaLimit(was)
	})
	const more = 8 << 20
	before, entries := b.limit(), b.maxEntries
	SetArenaLimit(was + more)
	if left := a.Left(); left != was+more {
		t.Errorf("%d bytes left of %d", left, was+more)
	}
	if limit := b.limit(); limit != before+more && b.memlock == 0 || b.maxEntries <= entries {
		t.Errorf("caches of %d bytes in %d registrations, before %d in %d", limit, b.maxEntries, before, entries)
	}
	b.SetLimits(1<<20, 10)
	SetArenaLimit(defaultSlab)
	if b.limit() != 1<<20 || b.maxEntries != 10 {
		t.Errorf("%d bytes in %d registrations, which the program has not set", b.limit(), b.maxEntries)
	}
	if _, err := a.Get(2 * defaultSlab); !errors.Is(err, syscall.ENOBUFS) {
		t.Errorf("Get beyond the limit: %v", err)
	}
}

// Every value is accepted as a limit. A program may remove the bound, and its caches still keep
// registrations.
func TestSetAnyArenaLimit(t *testing.T) {
	a, b := DefaultArena(), DefaultBudget()
	was, caches, entries := a.limit(), b.limit(), b.maxEntries
	t.Cleanup(func() { SetArenaLimit(was) })
	SetArenaLimit(math.MaxInt64)
	if a.limit() <= was || b.limit() < caches || b.maxEntries < entries {
		t.Errorf("without a bound: an arena of %d bytes, %v", a.limit(), b)
	}
	SetArenaLimit(math.MinInt64)
	if a.limit() != 0 || b.limit() < min(defaultMaxBytes, caches) || b.maxEntries != defaultMaxEntries {
		t.Errorf("with less than none: an arena of %d bytes, %v", a.limit(), b)
	}
}
