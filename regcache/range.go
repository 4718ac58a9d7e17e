package regcache

import (
	"fmt"
	"slices"
	"sort"
	"sync"
	"sync/atomic"
	"syscall"
)

// A Range is memory whose mapping is declared stable by its owner, or watched by the kernel. It applies
// to all caches of the process.
type Range struct {
	memory []byte // also keeps an object on Go's heap alive
	kind   Kind
	watch  *watcher // nil unless kind is Watched
	gone   atomic.Bool
	// unforked: a forked child does not get it.
	unforked bool
	// piece is the size of the pieces that are to be registered one by one. 0: the
	// whole range is registered if it is small enough.
	piece atomic.Uintptr

	regions regionSet // those that this range is the validator of
}

// Declare promises that b stays mapped to the pages that it has, or will have when they are first
// touched, until Withdraw: no munmap, mremap, MADV_DONTNEED or the like. Then all caches of the process
// may cache it from its first use on. Without a declaration, memory outside the Go heap is copied.
//
// The error matches syscall.EEXIST if a part of b is declared or watched already, and EINVAL if b is
// empty. Declare may be called concurrently.
func Declare(b []byte) (*Range, error) {
	return ranges.add(&Range{memory: b, kind: Declared})
}

// Withdraw ends the declaration or the watch. If it returns nil, no cache of the process has a
// registration of the range any more, and the memory may be unmapped. ErrInUse: transfers still use a
// registration, which is removed when they end. Any other error is that of a device that has not
// deregistered the memory. After either error the memory must stay mapped. (Registrations for one use
// are not counted: no Read or Write of the memory may be in progress.)
func (r *Range) Withdraw() error {
	err := r.invalidate(RangeWithdrawn)
	if r.watch != nil {
		r.watch.close(r.memory)
	}
	return err
}

// invalidate makes valid return false, before the memory can be declared again, and removes the range's
// regions.
func (r *Range) invalidate(cause Cause) error {
	r.gone.Store(true)
	ranges.remove(r)
	return r.regions.invalidateAll(cause)
}

func (r *Range) bounds() (start, end uintptr) {
	start = addressOf(r.memory)
	return start, start + uintptr(len(r.memory))
}

func (r *Range) valid() bool {
	return !r.gone.Load() && (r.watch == nil || r.watch.quiet())
}

func (r *Range) attach(region *Region) { r.regions.add(region) }

func (r *Range) detach(region *Region, err error) { r.regions.remove(region, err) }

// rangeSet is the set of a process's ranges, which do not overlap. It is searched when memory is
// registered, not at hits.
type rangeSet struct {
	mu  sync.RWMutex
	all []*Range // by address; guarded by mu
}

var ranges rangeSet

func (s *rangeSet) add(r *Range) (*Range, error) {
	if len(r.memory) == 0 {
		return nil, fmt.Errorf("regcache: declare: empty slice: %w", syscall.EINVAL)
	}
	start, end := r.bounds()
	s.mu.Lock()
	defer s.mu.Unlock()
	at := s.afterLocked(end - 1) // after the last range that starts before end
	if at > 0 {
		if _, last := s.all[at-1].bounds(); last > start {
			return nil, fmt.Errorf("regcache: declare: overlaps a declared range: %w", syscall.EEXIST)
		}
	}
	s.all = slices.Insert(s.all, at, r)
	return r, nil
}

func (s *rangeSet) remove(r *Range) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = slices.DeleteFunc(s.all, func(have *Range) bool { return have == r })
}

// afterLocked returns the position of the first range that starts after address.
func (s *rangeSet) afterLocked(address uintptr) int {
	return sort.Search(len(s.all), func(i int) bool {
		start, _ := s.all[i].bounds()
		return start > address
	})
}

// memory finds the range in which b lies, which is not empty.
func (s *rangeSet) memory(b []byte) (classified, bool) {
	first := addressOf(b)
	s.mu.RLock()
	defer s.mu.RUnlock()
	at := s.afterLocked(first)
	if at == 0 {
		return classified{}, false
	}
	r := s.all[at-1]
	start, end := r.bounds()
	last := first + uintptr(len(b)) - 1
	if last >= end || !r.valid() {
		return classified{}, false
	}
	if p := r.piece.Load(); p != 0 && (first-start)/p == (last-start)/p {
		start += (first - start) / p * p
		end = start + p
	}
	return classified{kind: r.kind, unforked: r.unforked, lo: start, hi: end, newValidator: func() validator { return r }}, true
}
