package regcache

import (
	"errors"
	"fmt"
	"math"
	"runtime"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"
)

// ErrUnknownMemory is returned by Acquire for memory of which nothing proves that its
// mapping stays (see KindOf). It was not registered: copy it through an Arena.
var ErrUnknownMemory = errors.New("regcache: memory of unknown kind")

// ErrClosed is returned by Acquire, and by an Arena's Get, after Close, and by a Buffer's ReadFrom
// after Put.
var ErrClosed = errors.New("regcache: cache closed")

// ErrInUse is returned when a Cache or an Arena is closed, or a Range withdrawn, while it is
// in use. Its registrations are removed when they are released.
var ErrInUse = errors.New("regcache: registration in use")

// Config configures a Cache. The zero value is what providers use.
type Config struct {
	// Budget limits what this cache and others keep registered. nil means
	// DefaultBudget.
	Budget *Budget

	// Disabled registers everything for one use: to measure without the cache, or to
	// exclude it when looking for a fault.
	Disabled bool

	// MaxRegistration is the device's largest registration in bytes. 0: it has no limit.
	MaxRegistration int

	// ArenaOnly registers memory of an Arena alone; other memory is ErrUnknownMemory. It is
	// for systems where the pages of a process are no longer those that a device has once it
	// has forked: an arena's are not the child's.
	ArenaOnly bool

	// trustEverything takes all regions for valid, so that a test can show that the
	// validators are needed.
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
	all       regionSet // everything registered, for Close

	stats   Stats       // this and what follows: guarded by budget.mu
	dead    []*Region   // for the goroutine of dropLater to deregister
	sweeper *time.Timer // nil unless a sweep is to come
}

// New returns an empty cache for registrar.
func New(registrar Registrar, config Config) *Cache {
	c := &Cache{registrar: registrar, config: config, budget: config.Budget, stats: Stats{Invalidated: make(map[Cause]uint64)}}
	if c.budget == nil {
		c.budget = DefaultBudget()
	}
	if config.MaxRegistration == 0 {
		c.config.MaxRegistration = math.MaxInt
	}
	c.budget.mu.Lock()
	c.budget.caches[c] = struct{}{}
	c.budget.mu.Unlock()
	return c
}

// Acquire returns a registration that covers b with at least the rights of
// access. The caller keeps b reachable and mapped until it has called Release.
//
// Local rights are served from the cache, BindWindow among them: where memory
// windows can be trusted, a provider acquires that, with LocalWrite if the peer is
// to write, and the peer gets the window's key.
//
// With a remote right the region is b exactly and access exactly, belongs to
// this call alone, and Release takes the peer's access away.
//
// Errors: ErrUnknownMemory, ErrClosed, syscall.EINVAL for an empty slice, one that
// matches syscall.ENOBUFS when the device takes no more memory though everything
// unused was given back, or not so much at once, or did so at one of the last 1,024 uses of b; or the
// registrar's own.
func (c *Cache) Acquire(b []byte, access Access) (*Region, error) { return c.acquire(b, access, nil) }

// acquire is Acquire for a user, or nil.
func (c *Cache) acquire(b []byte, access Access, u *User) (*Region, error) {
	if len(b) == 0 {
		return nil, fmt.Errorf("regcache: acquire: empty slice: %w", syscall.EINVAL)
	}
	if access&remoteAccess != 0 {
		return c.registerForPeer(b, access, u)
	}
	if r := c.lookup(b, access, u); r != nil {
		return r, nil
	}
	r, err := c.miss(b, access, u)
	runtime.KeepAlive(unsafe.SliceData(b))
	return r, err
}

// lookup is the hit. It neither locks nor allocates, but for a user's first of a region, and makes no
// system call except for watched memory.
func (c *Cache) lookup(b []byte, access Access, u *User) *Region {
	start := addressOf(b)
	r := c.index.find(start, start+uintptr(len(b)))
	if r == nil || r.access&access != access || !r.hold() {
		return nil
	}
	if !r.validator.valid() { // what has made it so takes the region out, or else merge does
		r.Release()
		return nil
	}
	if !r.used.Load() {
		r.used.Store(true)
	}
	if u != nil && r.lastUser.Load() != u {
		r.note(u)
	}
	r.hits.Add(1)
	return r
}

// miss registers b: for the cache if it is worth it and there is room, else for this use
// alone.
func (c *Cache) miss(b []byte, access Access, u *User) (*Region, error) {
	if c.closed.Load() {
		return nil, ErrClosed
	}
	c.count(func(s *Stats) { s.Misses++ })
	m := c.classify(b)
	if m.kind == Unknown {
		c.count(func(s *Stats) { s.Unknown++ })
		return nil, ErrUnknownMemory
	}
	worth, err := c.worthAcquired(b, m)
	if err != nil {
		return nil, err
	}
	if c.config.Disabled || !worth {
		return c.once(b, access, nil, &c.stats.Once)
	}
	r, err := c.promote(b, access, m, u)
	if err != nil && !errors.Is(err, syscall.ENOBUFS) {
		// Perhaps because of what lies around b: a guard page, or the end of a file.
		m.lo, m.hi = addressOf(b), addressOf(b)+uintptr(len(b))
		r, _ = c.promote(b, access, m, u)
	}
	if r != nil {
		return r, nil
	}
	return c.once(b, access, nil, &c.stats.Full)
}

// classify finds the kind of memory that b, which is not empty, lies in: Unknown if it is not to
// be registered.
func (c *Cache) classify(b []byte) classified {
	m := classify(b)
	if c.config.ArenaOnly && !m.unforked {
		return classified{kind: Unknown}
	}
	return m
}

// worthCaching reports whether memory is to be cached now: an arena's always, other memory after so
// many uses since it last was; what is declared or watched has had them at the first. ENOBUFS: the
// device has refused it lately (refusedUses).
func (c *Cache) worthCaching(b []byte, m classified, uses int) (worth bool, err error) {
	before := 0
	if m.promised() {
		before = uses
	}
	times := c.budget.seen.note(c.useOf(b, m), before)
	if times < 0 {
		err = syscall.ENOBUFS
	}
	return times >= uses || m.unforked, err
}

// worthAcquired is worthCaching for memory that is registered now, if only for this use. What the
// device has refused lately is not tried, but for an arena's.
func (c *Cache) worthAcquired(b []byte, m classified) (worth bool, err error) {
	worth, err = c.worthCaching(b, m, 1)
	if err != nil && !m.unforked {
		return false, c.refused(len(b), errors.New("refused lately"))
	}
	return worth || m.promised(), nil
}

func (c *Cache) useOf(b []byte, m classified) use {
	u := use{address: addressOf(b), cache: uintptr(unsafe.Pointer(c))}
	if c.whole(m) {
		u.address = m.lo
	}
	if m.object != nil {
		u.object = m.object()
	}
	return u
}

// Worth reports whether an Acquire of b with this local access would find it registered, or
// register it for the cache: it is an arena's, or declared or watched memory that is new, or it was
// acquired, or looked at by Worth, so many times before (at least 1), since it was last to be put into
// the cache.
// Worth registers nothing and does not block. Its error is ErrUnknownMemory, as Acquire's would be, or
// syscall.ENOBUFS for memory that the device refused at one of the last 1,024 uses.
func (c *Cache) Worth(b []byte, access Access, uses int) (bool, error) {
	if len(b) == 0 || len(b) > c.config.MaxRegistration || c.config.Disabled || c.closed.Load() {
		return false, nil
	}
	start := addressOf(b)
	if r := c.index.find(start, start+uintptr(len(b))); r != nil && r.access&access == access && r.validator.valid() {
		return true, nil
	}
	m := c.classify(b)
	if m.kind == Unknown {
		return false, ErrUnknownMemory
	}
	worth, err := c.worthCaching(b, m, uses)
	runtime.KeepAlive(unsafe.SliceData(b))
	return worth && err == nil, err
}

// once registers exactly b for one use, and counts that in count.
func (c *Cache) once(b []byte, access Access, pin *Region, count *uint64) (*Region, error) {
	start := addressOf(b)
	mr, err := c.register(start, len(b), access)
	if err != nil {
		return nil, err
	}
	c.count(func(*Stats) { *count++ })
	r := &Region{
		cache: c, start: start, end: start + uintptr(len(b)), access: access,
		mr: mr, keep: b, pin: pin,
	}
	r.refs.Store(1)
	c.all.add(r)
	return r, nil
}

// registerForPeer registers exactly b for a peer. A cached local registration beneath it keeps the
// pages pinned after the peer's is removed.
func (c *Cache) registerForPeer(b []byte, access Access, u *User) (*Region, error) {
	defer runtime.KeepAlive(unsafe.SliceData(b))
	if c.closed.Load() {
		return nil, ErrClosed
	}
	m := c.classify(b)
	if m.kind == Unknown {
		c.count(func(s *Stats) { s.Unknown++ })
		return nil, ErrUnknownMemory
	}
	var pin *Region
	if !c.config.Disabled {
		if pin = c.lookup(b, LocalRead, u); pin == nil {
			worth, err := c.worthAcquired(b, m)
			if err != nil {
				return nil, err
			}
			if worth {
				pin, _ = c.promote(b, LocalRead, m, u) // works without it, too
			}
		}
	}
	r, err := c.once(b, access, pin, &c.stats.Exposed)
	if err == nil || pin == nil {
		return r, err
	}
	pin.Release()
	if errors.Is(err, syscall.ENOBUFS) { // RLIMIT_MEMLOCK counted the pages twice
		return c.once(b, access, nil, &c.stats.Exposed)
	}
	return nil, err
}

// Close removes all registrations, and makes Acquire fail from now on; no Acquire may
// be under way. If it returns nil, the device has none left. ErrInUse: some are in use,
// and go when they are released. Any other error is the device's, which has kept some.
// Close may be called again, to see whether all are gone.
func (c *Cache) Close() error {
	b := c.budget
	b.mu.Lock()
	c.closed.Store(true)
	if c.sweeper != nil {
		c.sweeper.Stop() // one under way has nothing left to do, or is waited for as the others are
	}
	b.mu.Unlock()
	err := c.all.invalidateAll(CacheClosed)
	if err == ErrInUse {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, first := b.caches[c]; first {
		delete(b.caches, c)
		b.past.add(&c.stats)
	}
	return err
}
