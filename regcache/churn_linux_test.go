package regcache_test

import (
	"testing"
	"time"

	"github.com/sanconn/san/regcache"
	"github.com/sanconn/san/regcache/cachetest"
)

// newChurn returns a churn on a simulated card, with a cache that is small
// enough for regions to be evicted.
func newChurn(t *testing.T, config regcache.Config) *cachetest.Churn {
	t.Helper()
	card := regcache.NewNIC(t)
	config.Budget = regcache.NewBudget(16<<20, 48)
	cache, err := regcache.New(card, config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cache.Close(); err != nil {
			t.Error(err)
		}
	})
	return &cachetest.Churn{Cache: cache, Device: card}
}

func TestNoHitIsStale(t *testing.T) {
	newChurn(t, regcache.Config{}).Run(t)
}

// The same with the proofs off, to show that they are what keeps the cache right.
func TestWithoutProofsHitsAreStale(t *testing.T) {
	ch := newChurn(t, regcache.WithoutProofs())
	ch.UntilStale = true
	ch.Duration = time.Nanosecond // and up to a minute more
	if _, stale := ch.Run(t); stale == 0 {
		t.Error("no stale hit was seen: the churn does not test anything")
	}
}
