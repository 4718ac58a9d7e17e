package regcache_test

import (
	"testing"
	"time"

	"github.com/sanconn/san/internal/cachetest"
	"github.com/sanconn/san/regcache"
)

func TestNoHitIsStale(t *testing.T) {
	cachetest.NewChurn(t, regcache.NewNIC(t), regcache.Config{}).Run()
}

// Without validators there are stale hits. So they are what keeps the cache right.
func TestWithoutValidatorsHitsAreStale(t *testing.T) {
	churn := cachetest.NewChurn(t, regcache.NewNIC(t), regcache.WithoutValidators())
	churn.UntilStale = true
	churn.Duration = time.Nanosecond // the churn takes up to a minute more
	if _, stale := churn.Run(); stale == 0 {
		t.Error("no stale hit was seen: the churn does not test anything")
	}
}
