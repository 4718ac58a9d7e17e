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

// What decides whether a Write's memory is offered. While the peer reads the memory, the line is idle
// for two round trips, and the Write's processor polls. A copy keeps both busy. So an offer must not
// take more of the processor's time than the copy.
//
// What decides whether that memory is registered. A copy costs something for each Write; a registration
// costs something once for all following Writes, whose number is not known. Copying until the copies
// have cost as much as a registration takes at most twice the least possible cost (the ski rental
// problem; Karlin et al., Competitive Snoopy Caching, Algorithmica 3, 1988), if that is within
// mostCopies. After the cache has evicted memory, the count begins again. Binding a window in addition
// costs little compared with a copy of measureBytes, and is not measured.

const (
	// offerIdle is what an offer takes beside the transfer: two round trips of 4 µs, and the work of
	// both processes (docs/notes/rdma.md). offerBytes is what measureBytes take on the fastest line, of
	// 400 Gbit/s. A Write of more than offerPolls does not poll: it sleeps until the end is near
	// (NearDone).
	offerIdle  = 12 * time.Microsecond
	offerBytes = measureBytes * time.Second / 50e9
	offerPolls = 4 * measureBytes
	// byBuffer is the factor from the measured copy, of memory in the caches, to the way through the
	// send buffer: 27 to 29 µs for 1 MiB that is copied in 18 µs (docs/notes/rdma.md).
	byBuffer = 1.6
	// cachesHold is how many bytes of the arena may be in use for copies to be as fast as measured:
	// eight send buffers. With sixteen, offers move half as much again (docs/notes/rdma.md).
	cachesHold = 32 << 20

	// measureBytes is the size that is measured: the smallest Write that is offered. For larger Writes
	// a registration costs fewer copies, because part of its cost is independent of the size.
	measureBytes = memspeed.Bytes
	// mostCopies bounds the result if the host was busy during the measurement.
	mostCopies = 8
	// measureShare: without room to lock this many times measureBytes, a host needs the memory more
	// than the measurement.
	measureShare = 64
)

// costs is what copies, and registrations on one device, were measured to take.
type costs struct {
	once    sync.Once
	copying atomic.Int64 // nanoseconds for a copy of measureBytes; 0: not known
	copies  atomic.Int32 // how many copies of memory cost as much as registering it; 0: not known
}

// offerPays reports whether offering n bytes takes no more time than copying them, or whether the
// caches do not hold the memory that copies go through. As long as nothing is known, it returns true.
func (c *costs) offerPays(n int) bool {
	share := func(n int, of time.Duration) time.Duration { return of * time.Duration(n) / measureBytes }
	copying := time.Duration(c.copying.Load())
	if copying == 0 || offerIdle+share(min(n, offerPolls), offerBytes) <= share(n, time.Duration(byBuffer*float64(copying))) {
		return true
	}
	_, used := regcache.DefaultArena().Bytes()
	return used > cachesHold
}

// copiesBefore returns how often a Write's memory is copied before it is registered: once, as long as
// nothing is known.
func (c *costs) copiesBefore() int { return max(int(c.copies.Load()), 1) }

// registersLikeCopies reports whether registering memory is known to cost no more than copying it.
func (c *costs) registersLikeCopies() bool { return c.copies.Load() == 1 }

// measured has, by the device's key, a func() int that returns how many copies a registration costs.
var measured sync.Map

// measure measures the cost of copying, once per process, and of registering, once per device.
func (c *costs) measure(ctx *ibv.Context) {
	c.copying.Store(int64(memspeed.Copying()))
	once, _ := measured.LoadOrStore(keyOf(ctx), sync.OnceValue(func() int { return copiesOfRegistration(ctx) }))
	c.copies.Store(int32(once.(func() int)()))
}

// copiesOfRegistration returns how many copies of memory cost at least as much as registering and
// deregistering it; 0 if that cannot be measured.
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
		if mr, err = pd.RegMR(addressOf(memory), len(memory), 0); err == nil { // without any access for peers or for the device to write
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
