package regcache

import (
	"errors"
	"syscall"
)

const (
	// wholeMax: a promoted object up to this size is registered as a whole, whatever part was acquired,
	// so that all other parts of it hit later. Registering 4 MiB takes a few hundred microseconds.
	wholeMax = 4 << 20
	// wholeShare: such an object may also take at most 1/wholeShare of the budget.
	wholeShare = 4
	// mergeGrowth: a region may grow to this multiple of what was acquired, by merging the regions that
	// it overlaps. Beyond that it only replaces them: a large object that is processed in overlapping
	// steps would otherwise be registered from its start at each step.
	mergeGrowth = 4
	// refusedUses is after how many uses memory that the device has refused is tried again. Each
	// attempt costs the process all its idle registrations.
	refusedUses = 1024
)

// whole reports whether m is small enough to be registered as a whole.
func (c *Cache) whole(m classified) bool { return m.hi-m.lo <= c.wholeMost() }

// wholeMost returns how many bytes are registered at most when less was acquired.
func (c *Cache) wholeMost() uintptr {
	return uintptr(min(wholeMax, c.budget.limit()/wholeShare, int64(c.config.MaxRegistration)))
}

// promote registers b, and what may be registered with it, for the cache and for a user, who may be
// nil. If there is no room, it returns neither a region nor an error.
func (c *Cache) promote(b []byte, access Access, m classified, user *User) (*Region, error) {
	// The uses that were copied have paid for this registration. If the region goes, or there is no
	// room for it, the count begins again: too many buffers are then not registered at each use.
	u := c.useOf(b, m)
	c.budget.seen.set(u, 0)
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
		if errors.Is(err, syscall.ENOBUFS) {
			c.budget.seen.set(u, -refusedUses)
		}
		return nil, err
	}
	r := &Region{cache: c, start: lo, end: hi, access: access, mr: mr, kind: m.kind, validator: m.newValidator()}
	r.refs.Store(1)
	if user != nil {
		r.note(user)
	}
	c.all.add(r)
	if c.config.trustEverything {
		r.validator = always{}
	}
	r.validator.attach(r)
	if !c.enter(r, start, end) {
		// Another goroutine was faster, or the cache was closed: register for this use only.
		c.budget.unreserve(size)
		return r, nil
	}
	c.count(func(s *Stats) {
		s.Promoted++
		if merged {
			s.Merges++
		}
	})
	if !r.validator.valid() { // the range was withdrawn between classify and attach
		r.invalidate(r.kind.cause())
	}
	return r, nil
}

// merge widens a range by the valid regions that it overlaps, unless that makes it much larger. In
// either case it adds their rights.
func (c *Cache) merge(lo, hi uintptr, access Access) (uintptr, uintptr, Access, bool) {
	c.budget.mu.Lock()
	overlapping := c.index.overlappingLocked(lo, hi)
	c.budget.mu.Unlock()
	merged := false
	unionLo, unionHi := lo, hi
	for _, old := range overlapping {
		if !old.validator.valid() {
			old.invalidate(old.kind.cause())
			continue
		}
		unionLo, unionHi = min(unionLo, old.start), max(unionHi, old.end)
		access |= old.access
		merged = true
	}
	if union := unionHi - unionLo; union <= c.wholeMost() || union <= min(mergeGrowth*(hi-lo), uintptr(c.config.MaxRegistration)) {
		lo, hi = unionLo, unionHi
	}
	return lo, hi, access, merged
}

// enter puts r into the index in place of the regions that it overlaps, whose users become r's, and
// takes the cache's reference. If the cache is closed, or another region that serves [start, end) has
// been entered meanwhile, it does nothing and returns false.
func (c *Cache) enter(r *Region, start, end uintptr) bool {
	b := c.budget
	b.mu.Lock()
	if c.closed.Load() {
		b.mu.Unlock()
		return false
	}
	overlapping := c.index.overlappingLocked(r.start, r.end)
	for _, old := range overlapping {
		if old.start <= start && end <= old.end && old.access&r.access == r.access {
			b.mu.Unlock()
			return false
		}
	}
	var idle []*Region
	for _, old := range overlapping {
		for user := range old.users.Range {
			r.users.Store(user, nil)
		}
		if b.expelLocked(old) {
			idle = append(idle, old)
		}
	}
	r.refs.Add(1)
	b.insertLocked(r)
	b.mu.Unlock()
	dropAll(idle)
	return true
}
