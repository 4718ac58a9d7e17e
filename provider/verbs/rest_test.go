//go:build linux

package verbs

import (
	"flag"
	"fmt"
	"sync"
	"testing"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/regcache"
	"github.com/sanconn/san/session"
)

// registered is how many bytes this process has registered that caches do not give back
// when others need them.
func registered() int64 {
	_, messages := controlArena().Bytes()
	s := regcache.DefaultBudget().Stats()
	return messages + s.PinnedBytes - s.IdleBytes
}

// A connection at rest has its messages' memory registered, and nothing else; so too when
// it has been busy.
func TestConnectionAtRestIsSmall(t *testing.T) {
	nothingLeft(t)
	l := listen(t, Config{})
	before := registered()
	a, b := sessions(t, l, session.Config{})
	const ends = 2
	rests := func() error {
		_, boxes := regcache.DefaultArena().Bytes()
		if n := registered() - before; n > ends*restBytes || boxes != 0 {
			return fmt.Errorf("%d bytes are registered at its ends, want %d at most; %d bytes of boxes", n, ends*restBytes, boxes)
		}
		return nil
	}
	testenv.Eventually(t, patience, rests) // once the probe of the device has gone
	for range 2 {
		streams(t, a, b, 3<<20)
		if without(session.FeatureRDMAWrite) {
			continue
		}
		if st := a.Stats(); st.OfferedBytesSent == 0 {
			t.Errorf("nothing went by RDMA: %+v", st)
		}
	}
	testenv.Eventually(t, patience, rests)
	streams(t, a, b, 1<<20)
}

var resting = flag.Int("resting", 200, "connections that TestManyAtRest has at a time")

// As many connections as are wanted are open at a time, and each works, before others and
// behind them.
func TestManyAtRest(t *testing.T) {
	nothingLeft(t)
	l := listen(t, Config{})
	before := registered()
	type ends struct{ a, b *session.Session }
	var all []ends
	for range *resting {
		a, b := sessions(t, l, session.Config{})
		all = append(all, ends{a, b})
	}
	if n := registered() - before; n > int64(len(all))*2*restBytes {
		t.Errorf("%d connections have %d bytes registered", len(all), n)
	}
	var wg sync.WaitGroup
	for first := range 8 {
		wg.Go(func() {
			for i := first; i < len(all) && !t.Failed(); i += 8 {
				streams(t, all[i].a, all[i].b, 50_000)
			}
		})
	}
	wg.Wait()
}
