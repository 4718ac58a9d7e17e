package verbs

import (
	"runtime"
	"time"

	"github.com/sanconn/san/ibv"
)

// What decides whether a Write's memory is registered: a copy is paid with each Write, a
// registration once for all that follow, whose number is unknown. Copying until that has cost as
// much as registering costs at most twice the least (the ski rental problem; Karlin et al.,
// Competitive Snoopy Caching, Algorithmica 3, 1988), where that is within mostCopies.

const (
	// measureBytes is what is measured with: the smallest Write that is offered. Of larger
	// ones a registration costs fewer copies, as a part of its price is the same for all.
	measureBytes = defaultThreshold
	// measureTries: the fastest counts, as whatever else the host does only adds to it.
	measureTries = 3
	// mostCopies bounds what a host that was busy all the while makes of it.
	mostCopies = 8
	// measureShare: a host that allows to lock less than that many times measureBytes has more
	// need of it than to know.
	measureShare = 64
)

// copiesBefore is how often a Write's memory is copied before it is registered: once, as long as
// nothing is known.
func (d *device) copiesBefore() int { return max(int(d.copies.Load()), 1) }

// measure returns how many copies of memory cost as much as to register it, 0 if that cannot be
// found. It is part of the probe.
func (d *device) measure() int {
	if limit := memlock(); limit > 0 && limit < measureShare*measureBytes {
		return 0
	}
	pd, err := d.ctx.AllocPD()
	if err != nil {
		return 0
	}
	defer pd.Close()
	from, to := make([]byte, measureBytes), make([]byte, measureBytes)
	copying := fastest(func() { copy(to, from) })
	registering := fastest(func() {
		if err != nil {
			return
		}
		var mr *ibv.MR
		if mr, err = pd.RegMR(addressOf(to), len(to), 0); err == nil { // nobody can reach it, or write to it
			err = mr.Close()
		}
	})
	runtime.KeepAlive(to)
	if err != nil {
		return 0
	}
	return int(min(registering/max(copying, 1), mostCopies))
}

// fastest returns the least time that f took.
func fastest(f func()) time.Duration {
	f() // pages and caches
	least := time.Duration(1 << 62)
	for range measureTries {
		began := time.Now()
		f()
		least = min(least, time.Since(began))
	}
	return least
}
