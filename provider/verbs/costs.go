package verbs

import (
	"runtime"
	"sync"
	"time"

	"github.com/sanconn/san/ibv"
)

// What decides whether a Write's memory is registered: a copy is paid with each Write, a
// registration once for all that follow, whose number is unknown. Copying until that has cost as
// much as registering costs at most twice the least (the ski rental problem; Karlin et al.,
// Competitive Snoopy Caching, Algorithmica 3, 1988), where that is within mostCopies. To bind a
// window on top costs little beside a copy of measureBytes, and is not measured.

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

// registersLikeCopies reports whether registering memory is known to cost no more than to copy it.
func (d *device) registersLikeCopies() bool { return d.copies.Load() == 1 }

// measured has how many copies a registration costs, by the device's key: a func() int.
var measured sync.Map

// measure finds out what registering costs, once per process and device.
func (d *device) measure() {
	once, _ := measured.LoadOrStore(d.probeKey(), sync.OnceValue(d.copiesOfRegistration))
	d.copies.Store(int32(once.(func() int)()))
}

// copiesOfRegistration returns how many copies of memory cost no less than to register it, and to
// end that; 0 if that cannot be found.
func (d *device) copiesOfRegistration() int {
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
	copying = max(copying, 1)
	return int(min((registering+copying-1)/copying, mostCopies))
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
