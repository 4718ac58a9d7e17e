package regcache

import (
	"container/list"
	"os"
	"sync"
	"sync/atomic"
)

// A Region is memory that is registered now, and stays so until Release.
type Region struct {
	cache      *Cache
	start, end uintptr
	access     Access
	mr         MR
	kind       Kind
	validator  validator // nil for a region that is registered for one use

	// refs counts the holders, one of which is the cache while the region is in it. Whoever brings it
	// to 0 deregisters the region. It never rises from 0.
	refs atomic.Int64
	hits atomic.Uint64
	used atomic.Bool // since the budget last examined the region for eviction

	users    sync.Map             // by *User: those that have used it, as far as they were not found to have left
	lastUser atomic.Pointer[User] // the last one added to users, for which a hit needs no look-up

	keep []byte  // the memory of a region for one use
	pin  *Region // the local registration of an exposure's memory

	cached bool          // in the index; guarded by budget.mu, like place
	place  *list.Element // in the budget's order
}

// MR returns the device's registration.
func (r *Region) MR() MR { return r.mr }

// LKey returns the key of the region in the device's own work requests.
func (r *Region) LKey() uint32 { return r.mr.LKey }

// RKey returns the key of the region in a peer's work requests. It is for regions that were acquired
// with a remote right.
func (r *Region) RKey() uint32 { return r.mr.RKey }

// Range returns the range that is registered: the memory that was acquired, and perhaps more around it.
func (r *Region) Range() (start uintptr, n int) { return r.start, int(r.end - r.start) }

// size returns what the region counts as in the budget.
func (r *Region) size() int64 { return pinnedSize(r.start, r.end) }

// pinnedSize returns what a registration takes of RLIMIT_MEMLOCK, in bytes: every page that it touches
// (ib_umem_get, drivers/infiniband/core/umem.c).
func pinnedSize(start, end uintptr) int64 {
	return int64((end+pageSize-1)&^(pageSize-1) - start&^(pageSize-1))
}

var pageSize = uintptr(os.Getpagesize())

// hold takes a reference, unless the region is being deregistered, and reports whether it did.
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

// Release ends one use. The error is that of a device which has not deregistered the region: a peer
// that had access may still have it.
func (r *Region) Release() error {
	switch refs := r.refs.Add(-1); {
	case refs > 0:
		return nil
	case refs < 0:
		panic("regcache: Region released more often than acquired")
	}
	return r.drop()
}

// invalidate takes the region out of its cache because it is no longer valid, or has no users left. It
// is deregistered now, or at the last Release.
func (r *Region) invalidate(cause Cause) {
	if r.expel(cause) {
		r.drop()
	}
}

// expel is invalidate without the deregistration: if it returns true, the caller must drop the region.
func (r *Region) expel(cause Cause) (idle bool) {
	b := r.cache.budget
	b.mu.Lock()
	defer b.mu.Unlock()
	if !r.cached {
		return false
	}
	r.cache.stats.Invalidated[cause]++
	return b.expelLocked(r)
}
