package regcache

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"
)

// ErrUnknownMemory is returned by Acquire for memory whose mapping nothing vouches
// for (see KindOf). It was not registered: copy it through an Arena.
var ErrUnknownMemory = errors.New("regcache: memory of unknown kind")

// ErrClosed is returned by Acquire after Close.
var ErrClosed = errors.New("regcache: cache closed")

// ErrInUse is returned when a Cache, a Range or an Arena is ended while it is in use.
// Its registrations are removed when they are released.
var ErrInUse = errors.New("regcache: registration in use")

const (
	// A promoted object up to this size is registered as a whole, whatever
	// part was asked for, so that all later parts of it hit. Registering
	// 4 MiB takes a few hundred microseconds on the devices measured.
	wholeMax = 4 << 20
	// It is also at most one part of the budget in this many.
	wholeShare = 4
	// A region may grow to this multiple of what was asked for by merging those
	// that it overlaps. Beyond that it only replaces them: a large object that is
	// worked through in overlapping steps would otherwise be registered from its
	// start at each step.
	mergeGrowth = 4
)

// Config says how a cache works. The zero value is what providers want.
type Config struct {
	// Budget limits what this cache and others keep registered. nil means
	// DefaultBudget.
	Budget *Budget

	// Disabled registers everything for one use: to compare, or to rule the cache
	// out when looking for a fault.
	Disabled bool

	// trustEverything turns the proofs off, so that a test can show that the cache
	// needs them.
	trustEverything bool
}

// A Cache holds the registrations of one protection domain. Its methods may be
// called concurrently.
type Cache struct {
	registrar Registrar
	config    Config
	budget    *Budget
	index     index
	closed    atomic.Bool
	stats     counters
	all       regionSet // everything registered, for Close

	entries int       // this and what follows: guarded by budget.mu
	bytes   int64     //
	dead    []*Region // for the goroutine of dropLater to deregister
}

// New returns an empty cache for registrar.
func New(registrar Registrar, config Config) *Cache {
	c := &Cache{registrar: registrar, config: config, budget: config.Budget}
	if c.budget == nil {
		c.budget = DefaultBudget()
	}
	c.all.init()
	c.budget.mu.Lock()
	c.budget.caches[c] = struct{}{}
	c.budget.mu.Unlock()
	return c
}

// A Region is memory that is registered now, and stays so until Release.
type Region struct {
	cache      *Cache
	start, end uintptr
	access     Access
	mr         MR
	kind       Kind
	proof      proof // nil for a region that is not for the cache

	// refs counts the holders, among them the cache while the region is in it. Whoever
	// brings it to 0 deregisters the region. It never rises from 0.
	refs atomic.Int64
	hits atomic.Uint64
	used atomic.Uint64 // the budget's epoch at the last use

	keep []byte  // the memory of a region for one use
	pin  *Region // the local registration under an exposure

	cached bool   // in the index; this and the next two: guarded by budget.mu
	rank   uint64 // used, as the budget's order knows it
	place  int    // in the budget's order
}

// MR returns the device's registration.
func (r *Region) MR() MR { return r.mr }

// LKey names the region in the device's work requests.
func (r *Region) LKey() uint32 { return r.mr.LKey }

// RKey names the region in a peer's work requests. It is for regions acquired
// with a remote right.
func (r *Region) RKey() uint32 { return r.mr.RKey }

// Range returns what is registered: the memory asked for and perhaps more
// around it.
func (r *Region) Range() (start uintptr, n int) { return r.start, int(r.end - r.start) }

// Access returns the registration's rights: those asked for and perhaps more
// local ones.
func (r *Region) Access() Access { return r.access }

// size is what the region counts for in the budget.
func (r *Region) size() int64 { return pinnedSize(r.start, r.end) }

// pinnedSize is what a registration costs of RLIMIT_MEMLOCK, in bytes: every page
// that it touches (ib_umem_get, drivers/infiniband/core/umem.c).
func pinnedSize(start, end uintptr) int64 {
	return int64((end+pageSize-1)&^(pageSize-1) - start&^(pageSize-1))
}

var pageSize = uintptr(os.Getpagesize())

// Acquire returns a registration that covers b with at least the rights of
// access. The caller keeps b reachable and mapped until it has called Release.
//
// Local rights are served from the cache, BindWindow among them: where memory
// windows are to be trusted, that is what a provider asks for, with LocalWrite
// if the peer is to write, and the peer gets the window's key.
//
// With a remote right the region is b exactly and access exactly, belongs to
// this call alone, and Release takes the peer's access away.
//
// Errors: ErrUnknownMemory, ErrClosed, one that matches syscall.ENOBUFS when
// the device takes no more memory though everything unused was given back, or
// the registrar's own.
func (c *Cache) Acquire(b []byte, access Access) (*Region, error) {
	if len(b) == 0 {
		return nil, fmt.Errorf("regcache: acquire: empty slice: %w", syscall.EINVAL)
	}
	if access&remoteAccess != 0 {
		return c.expose(b, access)
	}
	if r := c.lookup(b, access); r != nil {
		return r, nil
	}
	r, err := c.miss(b, access)
	runtime.KeepAlive(unsafe.SliceData(b))
	return r, err
}

// lookup is the hit. It neither locks nor allocates, and makes no system call except for
// watched memory.
func (c *Cache) lookup(b []byte, access Access) *Region {
	start := addressOf(b)
	r := c.index.find(start, start+uintptr(len(b)))
	if r == nil || r.access&access != access || !r.hold() {
		return nil
	}
	if !r.valid() {
		r.invalidate(r.kind.cause())
		r.Release()
		return nil
	}
	if epoch := c.budget.epoch.Load(); r.used.Load() != epoch {
		r.used.Store(epoch)
	}
	r.hits.Add(1)
	return r
}

// miss registers b: for the cache if it is worth it and there is room, else for this use
// alone.
func (c *Cache) miss(b []byte, access Access) (*Region, error) {
	if c.closed.Load() {
		return nil, ErrClosed
	}
	c.stats.misses.Add(1)
	m := classify(b)
	if m.kind == Unknown {
		c.stats.unknown.Add(1)
		return nil, ErrUnknownMemory
	}
	if c.config.Disabled || !c.worthCaching(b, m) {
		return c.once(b, access, nil, &c.stats.once)
	}
	r, err := c.promote(b, access, m)
	if err != nil && !errors.Is(err, syscall.ENOBUFS) {
		// Perhaps because of what lies around b: a guard page, or the end of a file.
		m.lo, m.hi = addressOf(b), addressOf(b)+uintptr(len(b))
		r, _ = c.promote(b, access, m)
	}
	if r != nil {
		return r, nil
	}
	return c.once(b, access, nil, &c.stats.full)
}

// worthCaching reports whether memory is to be cached now: declared and watched memory at
// its first use, other memory at its second.
func (c *Cache) worthCaching(b []byte, m memory) bool {
	if m.kind == Declared || m.kind == Watched {
		return true
	}
	start := addressOf(b)
	if c.whole(m) {
		start = m.lo
	}
	return c.budget.seen.before(start ^ uintptr(unsafe.Pointer(c)))
}

// whole reports whether m is small enough to be registered as a whole.
func (c *Cache) whole(m memory) bool {
	return m.hi-m.lo <= uintptr(min(wholeMax, c.budget.limit()/wholeShare))
}

// promote registers b, and what may be registered with it, for the cache. It returns
// neither a region nor an error if there is no room.
func (c *Cache) promote(b []byte, access Access, m memory) (*Region, error) {
	start := addressOf(b)
	end := start + uintptr(len(b))
	lo, hi := start, end
	if c.whole(m) {
		lo, hi = m.lo, m.hi
	}
	lo, hi, access, merged := c.merge(lo, hi, access)

	size := pinnedSize(lo, hi)
	victims, ok := c.budget.reserve(size)
	dropFor(c, victims)
	if !ok {
		return nil, nil
	}
	mr, err := c.register(lo, int(hi-lo), access)
	if err != nil {
		c.budget.unreserve(size)
		return nil, err
	}
	r := &Region{cache: c, start: lo, end: hi, access: access, mr: mr, kind: m.kind, proof: m.prove()}
	r.refs.Store(1)
	c.all.add(r)
	if !c.config.trustEverything {
		r.proof.attach(r)
	}
	if !c.enter(r, start, end) {
		// Another goroutine was faster, or the cache was closed: for this use only.
		c.budget.unreserve(size)
		return r, nil
	}
	c.stats.promoted.Add(1)
	if merged {
		c.stats.merges.Add(1)
	}
	if !r.valid() { // the range was withdrawn between classify and attach
		r.invalidate(r.kind.cause())
	}
	return r, nil
}

// merge widens a range to take in the valid regions that it overlaps, unless they make it
// much larger. It adds their rights in either case.
func (c *Cache) merge(lo, hi uintptr, access Access) (uintptr, uintptr, Access, bool) {
	c.budget.mu.Lock()
	overlapping := c.index.overlapping(lo, hi)
	c.budget.mu.Unlock()
	merged := false
	unionLo, unionHi := lo, hi
	for _, old := range overlapping {
		if !old.valid() {
			old.invalidate(old.kind.cause())
			continue
		}
		unionLo, unionHi = min(unionLo, old.start), max(unionHi, old.end)
		access |= old.access
		merged = true
	}
	if unionHi-unionLo <= mergeGrowth*(hi-lo) || int64(unionHi-unionLo) <= min(wholeMax, c.budget.limit()/wholeShare) {
		lo, hi = unionLo, unionHi
	}
	return lo, hi, access, merged
}

// enter puts r into the index in place of the regions that it overlaps, and takes the
// cache's reference. It does nothing and returns false if the cache is closed, or if
// another region that serves [start, end) as well has been entered meanwhile.
func (c *Cache) enter(r *Region, start, end uintptr) bool {
	b := c.budget
	b.mu.Lock()
	if c.closed.Load() {
		b.mu.Unlock()
		return false
	}
	overlapping := c.index.overlapping(r.start, r.end)
	for _, old := range overlapping {
		if old.start <= start && end <= old.end && old.access&r.access == r.access {
			b.mu.Unlock()
			return false
		}
	}
	var idle []*Region
	for _, old := range overlapping {
		if b.forget(old) {
			idle = append(idle, old)
		}
	}
	r.refs.Add(1)
	b.remember(r)
	b.mu.Unlock()
	dropAll(idle)
	return true
}

// once registers exactly b for one use, and counts that in count.
func (c *Cache) once(b []byte, access Access, pin *Region, count *atomic.Uint64) (*Region, error) {
	start := addressOf(b)
	mr, err := c.register(start, len(b), access)
	if err != nil {
		return nil, err
	}
	count.Add(1)
	r := &Region{
		cache: c, start: start, end: start + uintptr(len(b)), access: access,
		mr: mr, keep: b, pin: pin,
	}
	r.refs.Store(1)
	c.all.add(r)
	return r, nil
}

// expose registers exactly b for a peer. A cached local registration beneath it keeps the
// pages pinned after the peer's is removed.
func (c *Cache) expose(b []byte, access Access) (*Region, error) {
	defer runtime.KeepAlive(unsafe.SliceData(b))
	if c.closed.Load() {
		return nil, ErrClosed
	}
	m := classify(b)
	if m.kind == Unknown {
		c.stats.unknown.Add(1)
		return nil, ErrUnknownMemory
	}
	var pin *Region
	if !c.config.Disabled {
		pin = c.lookup(b, LocalRead)
		if pin == nil && c.worthCaching(b, m) {
			pin, _ = c.promote(b, LocalRead, m) // works without it, too
		}
	}
	r, err := c.once(b, access, pin, &c.stats.exposed)
	if err == nil || pin == nil {
		return r, err
	}
	pin.Release()
	if errors.Is(err, syscall.ENOBUFS) { // RLIMIT_MEMLOCK counted the pages twice
		return c.once(b, access, nil, &c.stats.exposed)
	}
	return nil, err
}

// register registers with the device. If that is out of memory, it gives back everything
// unused and tries once more.
func (c *Cache) register(start uintptr, n int, access Access) (MR, error) {
	if limit := c.budget.memlock; limit != 0 && int64(n) > limit {
		return MR{}, c.refused(n, syscall.ENOMEM)
	}
	mr, err := c.registerOnce(start, n, access)
	if errors.Is(err, syscall.ENOMEM) {
		c.stats.flushes.Add(1)
		c.budget.Flush()
		mr, err = c.registerOnce(start, n, access)
	}
	switch {
	case errors.Is(err, syscall.ENOMEM):
		return MR{}, c.refused(n, err)
	case err != nil:
		c.stats.failed.Add(1)
		return MR{}, fmt.Errorf("regcache: register %d bytes for %v: %w", n, access, err)
	}
	c.stats.pinnedEntries.Add(1)
	c.stats.pinnedBytes.Add(pinnedSize(start, start+uintptr(n)))
	return mr, nil
}

func (c *Cache) refused(n int, err error) error {
	c.stats.refused.Add(1)
	return fmt.Errorf("regcache: register %d bytes: %w: %w; %v", n, syscall.ENOBUFS, err, c.budget)
}

func (c *Cache) registerOnce(start uintptr, n int, access Access) (MR, error) {
	began := time.Now()
	mr, err := c.registrar.Register(start, n, access)
	c.stats.registerNanoseconds.Add(int64(time.Since(began)))
	c.stats.registrations.Add(1)
	return mr, err
}

// hold takes a reference, unless the region is being deregistered.
func (r *Region) hold() bool {
	for {
		refs := r.refs.Load()
		if refs <= 0 {
			return false
		}
		if r.refs.CompareAndSwap(refs, refs+1) {
			return true
		}
	}
}

func (r *Region) valid() bool { return r.cache.config.trustEverything || r.proof.valid() }

// Release ends one use. An error is the device's, which was to deregister the region and
// has not: a peer that had access may still have it.
func (r *Region) Release() error {
	switch refs := r.refs.Add(-1); {
	case refs > 0:
		return nil
	case refs < 0:
		panic("regcache: Region released more often than acquired")
	}
	return r.drop()
}

// drop deregisters. Nobody holds the region, and no lock is held.
func (r *Region) drop() error {
	c := r.cache
	began := time.Now()
	err := c.registrar.Deregister(r.mr)
	c.stats.deregisterNanoseconds.Add(int64(time.Since(began)))
	c.stats.deregistrations.Add(1)
	if err != nil {
		c.stats.deregisterFailed.Add(1)
		err = fmt.Errorf("regcache: deregister %d bytes: %w", r.end-r.start, err)
	} else {
		c.stats.pinnedEntries.Add(-1)
		c.stats.pinnedBytes.Add(-r.size())
	}
	c.stats.hits.Add(r.hits.Swap(0))
	if r.proof != nil {
		r.proof.detach(r, err)
	}
	c.all.remove(r, err) // last, so that whoever waits finds complete statistics
	if r.pin != nil {
		r.pin.Release()
	}
	r.keep = nil
	return err
}

// dropAll drops regions that were taken out of their caches.
func dropAll(regions []*Region) {
	for _, r := range regions {
		r.drop()
	}
}

// otherTime bounds how long a cache waits while others deregister what made room for it:
// their devices may hang.
const otherTime = 10 * time.Millisecond

// dropFor drops the regions that were evicted to make room for c. Regions of other caches
// are left to those caches' goroutines.
func dropFor(c *Cache, victims []*Region) {
	var others []*Cache
	for _, r := range victims {
		if r.cache == c {
			r.drop()
			continue
		}
		r.cache.dropLater(r)
		others = append(others, r.cache)
	}
	if others == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), otherTime)
	defer cancel()
	for _, other := range others {
		other.all.dropped(ctx.Done())
	}
}

// dropLater drops a region in a goroutine of the cache, which ends when there are no more.
// Closing the cache or withdrawing the region's range waits for it.
func (c *Cache) dropLater(r *Region) {
	c.budget.mu.Lock()
	defer c.budget.mu.Unlock()
	c.dead = append(c.dead, r)
	if len(c.dead) == 1 {
		go c.dropDead()
	}
}

func (c *Cache) dropDead() {
	mu := &c.budget.mu
	for more := true; more; {
		mu.Lock()
		r := c.dead[0]
		mu.Unlock()
		r.drop()
		mu.Lock()
		c.dead[0] = nil
		c.dead = c.dead[1:]
		if more = len(c.dead) > 0; !more {
			c.dead = nil
		}
		mu.Unlock()
	}
}

// invalidate takes the region out of its cache because its proof has ended.
// It is deregistered now, or at the last Release.
func (r *Region) invalidate(cause Cause) {
	if r.expel(cause) {
		r.drop()
	}
}

// expel is invalidate without the deregistration: if it returns true, the caller has to drop
// the region.
func (r *Region) expel(cause Cause) (idle bool) {
	b := r.cache.budget
	b.mu.Lock()
	if !r.cached {
		b.mu.Unlock()
		return false
	}
	idle = b.forget(r)
	b.mu.Unlock()
	r.cache.stats.invalidated[cause].Add(1)
	return idle
}

// Close removes all registrations, and makes Acquire fail from now on; no Acquire may
// be under way. If it returns nil, the device has none left. ErrInUse: some are in use,
// and go when they are released. Any other error is the device's, which has kept some.
// Close may be called again, to see whether all are gone.
func (c *Cache) Close() error {
	b := c.budget
	b.mu.Lock()
	c.closed.Store(true)
	b.mu.Unlock()
	err := c.all.settle(CacheClosed)
	if err == ErrInUse {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, first := b.caches[c]; first {
		delete(b.caches, c)
		last := c.totals()
		b.past.add(&last)
	}
	return err
}
