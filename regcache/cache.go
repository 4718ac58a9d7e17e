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

// ErrUnknownMemory is the error of Acquire for memory whose mapping may change without notice (see
// KindOf). The memory was not registered: copy it through an Arena.
var ErrUnknownMemory = errors.New("regcache: memory of unknown kind")

// ErrClosed is the error of Acquire and of an Arena's Get after Close, and of a Buffer's ReadFrom after
// Put.
var ErrClosed = errors.New("regcache: cache closed")

// ErrInUse is the error of closing a Cache or an Arena, or of withdrawing a Range, while it is in use.
// Its registrations are removed when they are released.
var ErrInUse = errors.New("regcache: registration in use")

// Config configures a Cache. The zero value is what providers use.
type Config struct {
	// Budget limits what this cache and others keep registered. nil means DefaultBudget.
	Budget *Budget

	// Disabled makes each registration serve one use only, to measure without the cache or to look for
	// a fault.
	Disabled bool

	// MaxRegistration is the device's largest registration in bytes; 0: no limit.
	MaxRegistration int

	// ArenaOnly makes all memory ErrUnknownMemory except an Arena's. It is for systems on which, after
	// a fork, this process may have other pages than the device. A child gets no pages of an arena, so
	// these stay the same.
	ArenaOnly bool

	// trustEverything treats all regions as valid, so that a test can show that the validators are
	// needed.
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

	stats   Stats       // this and the fields below are guarded by budget.mu
	dead    []*Region   // to be deregistered by the goroutine of dropLater
	sweeper *time.Timer // nil unless a sweep is scheduled
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

// Acquire returns a registration that covers b with at least the rights of access. The caller must keep
// b reachable and mapped until it has called Release.
//
// Registrations with local rights come from the cache, including BindWindow: if memory windows can be
// trusted, a provider acquires BindWindow, with LocalWrite if the peer is to write, and gives the peer
// the window's key.
//
// A registration with a remote right has exactly b and exactly access, belongs to this call alone, and
// Release ends the peer's access.
//
// Errors: ErrUnknownMemory; ErrClosed; syscall.EINVAL for an empty slice; one that matches
// syscall.ENOBUFS if the device takes no more memory although everything unused was deregistered, or
// not so much at once, or if that was so at one of the last 1,024 uses of b; or the registrar's own.
func (c *Cache) Acquire(b []byte, access Access) (*Region, error) { return c.acquire(b, access, nil) }

// acquire is Acquire for a user, who may be nil.
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

// lookup is a cache hit. It takes no lock, allocates only when a user uses a region for the first time,
// and makes a system call only for watched memory.
func (c *Cache) lookup(b []byte, access Access, u *User) *Region {
	start := addressOf(b)
	r := c.index.find(start, start+uintptr(len(b)))
	if r == nil || r.access&access != access || !r.hold() {
		return nil
	}
	if !r.validator.valid() { // whoever has made it invalid takes the region out, or else merge does
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

// miss registers b: for the cache if that is worthwhile and there is room, else for this use only.
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
		// Perhaps because of what is around b: a guard page, or the end of a file.
		m.lo, m.hi = addressOf(b), addressOf(b)+uintptr(len(b))
		r, _ = c.promote(b, access, m, u)
	}
	if r != nil {
		return r, nil
	}
	return c.once(b, access, nil, &c.stats.Full)
}

// classify finds the kind of memory in which b lies, which is not empty. Unknown: it is not to be
// registered.
func (c *Cache) classify(b []byte) classified {
	m := classify(b)
	if c.config.ArenaOnly && !m.unforked {
		return classified{kind: Unknown}
	}
	return m
}

// worthCaching reports whether memory is to be cached now: an arena's always; declared or watched
// memory at its first use; other memory after so many uses since it was last cached. ENOBUFS: the
// device has refused it recently (refusedUses).
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

// worthAcquired is worthCaching for memory that Acquire registers now in any case. Except for an
// arena's, it returns ENOBUFS for memory that the device has refused recently.
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

// Worth reports whether an Acquire of b with this local access would find it registered or register it
// for the cache. That is so for an arena's memory; for declared or watched memory that is new; and for
// memory that Acquire or Worth has seen so many times (at least once) since it was last put into the
// cache.
//
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

// once registers exactly b for one use, and increments count.
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

// registerForPeer registers exactly b for a peer. A cached local registration of the same memory keeps
// the pages pinned after the peer's registration is removed.
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
				pin, _ = c.promote(b, LocalRead, m, u) // not needed for the peer's
			}
		}
	}
	r, err := c.once(b, access, pin, &c.stats.Exposed)
	if err == nil || pin == nil {
		return r, err
	}
	pin.Release()
	if errors.Is(err, syscall.ENOBUFS) { // RLIMIT_MEMLOCK counts the pages twice
		return c.once(b, access, nil, &c.stats.Exposed)
	}
	return nil, err
}

// Close removes all registrations. Acquire fails from then on; no Acquire may be in progress. If Close
// returns nil, the device has no registration of this cache left. ErrInUse: some are in use, and are
// removed when they are released. Any other error is the device's, which has kept some. Close may be
// called again, to find out whether all are gone.
func (c *Cache) Close() error {
	b := c.budget
	b.mu.Lock()
	c.closed.Store(true)
	if c.sweeper != nil {
		c.sweeper.Stop() // a running sweep has nothing left to do, or is waited for like the others
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
