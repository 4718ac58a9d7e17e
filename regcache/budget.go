package regcache

import (
	"container/list"
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"
)

const (
	// defaultMaxBytes is what the caches of a process may keep registered besides DefaultArena, or less
	// if a memlock limit applies.
	defaultMaxBytes = 256 << 20
	// defaultMaxEntries is as in libfabric (FI_MR_CACHE_MAX_COUNT). A device has room for far more, of
	// which an arena gets some for its pieces of minAlone.
	defaultMaxEntries = 1024
	// Cached registrations may take 1/memlockShare of RLIMIT_MEMLOCK. The rest is for control buffers
	// and for registrations that are not cached.
	memlockShare = 2
)

// A Budget limits the memory that caches keep registered. RLIMIT_MEMLOCK applies to the whole process,
// and counts a page again for each registration. So the caches of a process share one budget:
// DefaultBudget, unless a Config names another. A region in use is never evicted; memory that does not
// fit is registered for one use. Its methods may be called concurrently.
type Budget struct {
	seen seen

	// memlock is RLIMIT_MEMLOCK if it applies, else 0. No larger registration is tried.
	memlock int64

	mu         sync.Mutex // guards the fields below, and changes of all indexes
	maxBytes   int64
	maxEntries int
	usual      bool  // the limits are the default ones
	bytes      int64 // of regions that are in a cache, or about to be
	entries    int
	order      list.List // of every region in a cache, to be evicted from the front on
	why        string
	caches     map[*Cache]struct{} // those that are not completely closed
	past       Stats               // of completely closed caches
}

// NewBudget returns a separate budget of maxBytes of registered memory in maxEntries
// registrations, for tests and for processes that separate devices.
func NewBudget(maxBytes int64, maxEntries int) *Budget {
	return &Budget{
		maxBytes: maxBytes, maxEntries: maxEntries, why: "set by the program",
		caches: make(map[*Cache]struct{}),
		past:   Stats{Invalidated: make(map[Cause]uint64)},
	}
}

// DefaultBudget returns the budget of the process: 256 MiB in 1024 registrations, plus what
// DefaultArena may have in pieces of 128 KiB, but at most half of RLIMIT_MEMLOCK if that applies (it
// does not to a process with CAP_IPC_LOCK in the initial user namespace). SetLimits changes it.
var DefaultBudget = sync.OnceValue(func() *Budget {
	b := NewBudget(defaultMaxBytes, defaultMaxEntries)
	b.why = "no RLIMIT_MEMLOCK applies"
	if limit, limited := MemlockLimit(); limited {
		b.why = fmt.Sprintf("1/%d of RLIMIT_MEMLOCK, which is %s; raise it with ulimit -l, LimitMEMLOCK= or CAP_IPC_LOCK",
			memlockShare, sizeString(limit))
		b.memlock = limit
	}
	b.usual = true
	b.fitArena(DefaultArena().limit())
	return b
})

// fitArena sets the default limits for an arena of that size.
func (b *Budget) fitArena(arena int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.usual {
		return
	}
	b.maxBytes, b.maxEntries = defaultMaxBytes+arena, defaultMaxEntries+int(arena/minAlone)
	if b.memlock != 0 {
		b.maxBytes = min(b.memlock/memlockShare, b.maxBytes)
	}
}

// SetLimits changes the limits, in bytes and in registrations. Unused regions beyond them are
// deregistered at once; others once they are unused and their room is needed.
func (b *Budget) SetLimits(maxBytes int64, maxEntries int) {
	b.mu.Lock()
	b.maxBytes, b.maxEntries, b.why, b.usual = maxBytes, maxEntries, "set by the program", false
	victims, _ := b.makeRoomLocked(0, 0)
	b.mu.Unlock()
	dropAll(victims)
}

// String describes the limits, the reason for them, and how much of them is used.
func (b *Budget) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return fmt.Sprintf("%s in %d registrations cached, of at most %s in %d (%s)",
		sizeString(b.bytes), b.entries, sizeString(b.maxBytes), b.maxEntries, b.why)
}

func (b *Budget) limit() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.maxBytes
}

// reserve takes room for one more region of n bytes, or returns false if there is none. In both cases
// the caller must drop the victims.
func (b *Budget) reserve(n int64) (victims []*Region, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if n > b.maxBytes {
		return nil, false // evicting would not help
	}
	victims, ok = b.makeRoomLocked(n, 1)
	if ok {
		b.bytes += n
		b.entries++
	}
	return victims, ok
}

func (b *Budget) unreserve(n int64) {
	b.mu.Lock()
	b.bytes -= n
	b.entries--
	b.mu.Unlock()
}

// makeRoomLocked evicts regions until n more bytes and entries fit, the least recently used first, as
// far as used tells. The caller must drop the victims, whether or not there is room.
func (b *Budget) makeRoomLocked(n int64, entries int) (victims []*Region, ok bool) {
	// Two tries for each region are enough: one moves it to the end of the order if it was used since
	// the last time, and one evicts it unless it is in use.
	for tries := 2 * b.order.Len(); ; tries-- {
		if b.bytes+n <= b.maxBytes && b.entries+entries <= b.maxEntries {
			return victims, true
		}
		if tries <= 0 || b.order.Len() == 0 {
			return victims, false
		}
		if r := b.order.Front().Value.(*Region); !r.used.Swap(false) && b.evictLocked(r) {
			victims = append(victims, r)
		} else {
			b.order.MoveToBack(r.place)
		}
	}
}

// flushTime bounds how long Flush waits for devices, which usually take milliseconds.
const flushTime = time.Second

// Flush deregisters what is cached and not in use, for other users of RLIMIT_MEMLOCK. It waits at most
// a second for the devices, including those that deregister what others have evicted.
func (b *Budget) Flush() {
	b.mu.Lock()
	var victims []*Region
	for _, r := range b.regionsLocked() {
		if b.evictLocked(r) {
			victims = append(victims, r)
		}
	}
	caches := slices.Collect(maps.Keys(b.caches))
	b.mu.Unlock()
	for _, r := range victims {
		r.cache.dropLater(r)
	}
	ctx, cancel := context.WithTimeout(context.Background(), flushTime)
	defer cancel()
	for _, c := range caches {
		c.all.dropped(ctx.Done())
	}
}

// evictLocked takes a region out of its cache if it is not in use. Then the caller must drop it.
// r.cached is true.
func (b *Budget) evictLocked(r *Region) bool {
	if !r.refs.CompareAndSwap(1, 0) {
		return false
	}
	b.removeLocked(r)
	r.cache.stats.Evictions++
	return true
}

// expelLocked takes a region out of its cache, in use or not, and reports whether the caller must drop
// it now. r.cached is true.
func (b *Budget) expelLocked(r *Region) (idle bool) {
	b.removeLocked(r)
	return r.refs.Add(-1) == 0
}

func (b *Budget) removeLocked(r *Region) {
	r.cache.index.removeLocked(r)
	st := &r.cache.stats
	st.Hits += r.hits.Swap(0)
	st.Entries--
	st.Bytes -= r.size()
	b.order.Remove(r.place)
	b.bytes -= r.size()
	b.entries--
	r.cached = false
}

// insertLocked puts a region into its cache. Room for it was reserved.
func (b *Budget) insertLocked(r *Region) {
	r.cache.index.insertLocked(r)
	r.cache.stats.Entries++
	r.cache.stats.Bytes += r.size()
	r.cached = true
	r.place = b.order.PushBack(r)
}

// regionsLocked lists the regions in all caches.
func (b *Budget) regionsLocked() []*Region {
	all := make([]*Region, 0, b.order.Len())
	for e := b.order.Front(); e != nil; e = e.Next() {
		all = append(all, e.Value.(*Region))
	}
	return all
}

func sizeString(n int64) string {
	switch {
	case n >= 1<<20 && n%(1<<20) == 0:
		return fmt.Sprintf("%d MiB", n>>20)
	case n >= 1<<10:
		return fmt.Sprintf("%d KiB", n>>10)
	}
	return fmt.Sprintf("%d bytes", n)
}
