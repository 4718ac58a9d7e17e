package regcache

import (
	"maps"
	"slices"
	"sync"
)

// regionSet is the regions of somebody who has to know when they are all
// deregistered: a cache before its protection domain goes, a range before its
// memory does.
type regionSet struct {
	mu      sync.Mutex
	changed sync.Cond // one was removed
	regions map[*Region]struct{}
}

func (s *regionSet) init() {
	s.changed.L = &s.mu
	s.regions = make(map[*Region]struct{})
}

// add notes a region that is registered.
func (s *regionSet) add(r *Region) {
	s.mu.Lock()
	s.regions[r] = struct{}{}
	s.mu.Unlock()
}

// remove notes that the device has deregistered r.
func (s *regionSet) remove(r *Region) {
	s.mu.Lock()
	delete(s.regions, r)
	s.changed.Broadcast()
	s.mu.Unlock()
}

// settle takes all regions out of their cache and waits for the device to have
// deregistered those that nobody uses. ErrInUse means that there are others.
func (s *regionSet) settle(cause Cause) error {
	s.mu.Lock()
	regions := slices.Collect(maps.Keys(s.regions))
	s.mu.Unlock()
	for _, r := range regions {
		r.invalidate(cause)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for r := range s.regions {
		for r.refs.Load() == 0 && s.has(r) {
			s.changed.Wait() // somebody else is at it
		}
	}
	if len(s.regions) != 0 {
		return ErrInUse
	}
	return nil
}

// has reports whether r is still registered. mu is held.
func (s *regionSet) has(r *Region) bool {
	_, ok := s.regions[r]
	return ok
}
