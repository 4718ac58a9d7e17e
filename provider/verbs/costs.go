package verbs

import (
	"runtime"
	"time"

	"github.com/sanconn/san/ibv"
)

// What decides whether a Write's memory is registered: a copy is paid with each Write, a
// registration once for all that follow. Nobody knows how many will. Who copies until that has
// cost as much as registering never pays more than twice the least (the ski rental problem;
// Karlin et al., Competitive Snoopy Caching, Algorithmica 3, 1988).

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

// copies is how many copies of a Write's memory cost as much as to register it.
func (d *device) copies() int { return max(int(d.price.Load()), 1) }

// measure finds out, once for an open device. Nobody waits for it: until then it is one.
func (d *device) measure() {
	if limit := memlock(); limit > 0 && limit < measureShare*measureBytes {
		return
	}
	pd, err := d.ctx.AllocPD()
	if err != nil {
		return // connections will have the error
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
	if err == nil {
		d.price.Store(int32(min(max(registering/max(copying, 1), 1), mostCopies)))
	}
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
