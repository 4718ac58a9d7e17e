package verbs

import (
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/internal/memspeed"
	"github.com/sanconn/san/regcache"
)

// What decides whether a Write's memory is offered. While the peer reads it the line is idle for two
// round trips, and the Write's processor polls; a copy keeps both busy. So an offer has to take no
// more of the processor's time than the copy.
//
// And what decides whether that memory is registered: a copy is paid with each Write, a
// registration once for all that follow, whose number is unknown. Copying until that has cost as
// much as registering costs at most twice the least (the ski rental problem; Karlin et al.,
// Competitive Snoopy Caching, Algorithmica 3, 1988), where that is within mostCopies. What the cache
// has evicted is paid for anew. To bind a window on top costs little beside a copy of measureBytes,
// and is not measured.

const (
	// offerIdle is what an offer takes beside the bytes: two round trips of 4 µs, and what both
	// processes do then (docs/notes/rdma.md). offerBytes is what measureBytes take on the fastest
	// line, of 400 Gbit/s; of more than offerPolls a Write sleeps until the end is near (NearDone).
	offerIdle  = 12 * time.Microsecond
	offerBytes = measureBytes * time.Second / 50e9
	offerPolls = 4 * measureBytes
	// byBuffer: what is measured is the copy alone, of memory that the caches hold. By way of the
	// send buffer it takes that many times as long: 27 to 29 µs a MiB where the copy takes 18
	// (docs/notes/rdma.md).
	byBuffer = 1.6
	// cachesHold is how many bytes of the arena may be in use where copies are as fast as that:
	// eight send buffers. With sixteen, offers move half as much again (docs/notes/rdma.md).
	cachesHold = 32 << 20

	// measureBytes is what is measured with: the smallest Write that is offered. Of larger
	// ones a registration costs fewer copies, as a part of its price is the same for all.
	measureBytes = memspeed.Bytes
	// mostCopies bounds what a host that was busy all the while makes of it.
	mostCopies = 8
	// measureShare: a host that allows to lock less than that many times measureBytes has more
	// need of it than to know.
	measureShare = 64
)

// costs are what one device's copies and registrations were measured to take.
type costs struct {
	once    sync.Once
	copying atomic.Int64 // nanoseconds in which measureBytes are copied; 0: not known
	copies  atomic.Int32 // how many copies of memory cost as much as to register it; 0: not known
}

// offerPays reports whether to offer n bytes takes no more time than to copy them, or the caches do not
// hold what copies go through. It is so as long as nothing is known.
func (c *costs) offerPays(n int) bool {
	share := func(n int, of time.Duration) time.Duration { return of * time.Duration(n) / measureBytes }
	copying := time.Duration(c.copying.Load())
	if copying == 0 || offerIdle+share(min(n, offerPolls), offerBytes) <= share(n, time.Duration(byBuffer*float64(copying))) {
		return true
	}
	_, used := regcache.DefaultArena().Bytes()
	return used > cachesHold
}

// copiesBefore is how often a Write's memory is copied before it is registered: once, as long as
// nothing is known.
func (c *costs) copiesBefore() int { return max(int(c.copies.Load()), 1) }

// registersLikeCopies reports whether registering memory is known to cost no more than to copy it.
func (c *costs) registersLikeCopies() bool { return c.copies.Load() == 1 }

// measured has how many copies a registration costs, by the device's key: a func() int.
var measured sync.Map

// measure finds out what copying costs, once per process, and registering, once per device, too.
func (c *costs) measure(ctx *ibv.Context) {
	c.copying.Store(int64(memspeed.Copying()))
	once, _ := measured.LoadOrStore(keyOf(ctx), sync.OnceValue(func() int { return copiesOfRegistration(ctx) }))
	c.copies.Store(int32(once.(func() int)()))
}

// copiesOfRegistration returns how many copies of memory cost no less than to register it, and to
// end that; 0 if that cannot be found.
func copiesOfRegistration(ctx *ibv.Context) int {
	if limit := memlock(); limit > 0 && limit < measureShare*measureBytes {
		return 0
	}
	pd, err := ctx.AllocPD()
	if err != nil {
		return 0
	}
	defer pd.Close()
	memory := make([]byte, measureBytes)
	registering := memspeed.Fastest(func() {
		if err != nil {
			return
		}
		var mr *ibv.MR
		if mr, err = pd.RegMR(addressOf(memory), len(memory), 0); err == nil { // nobody can reach it, or write to it
			err = mr.Close()
		}
	})
	runtime.KeepAlive(memory)
	if err != nil {
		return 0
	}
	copying := memspeed.Copying()
	return int(min((registering+copying-1)/copying, mostCopies))
}
