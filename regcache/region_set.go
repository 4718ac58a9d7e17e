package regcache

import (
	"maps"
	"slices"
	"sync"
)

// regionSet is the set of registered regions of a cache or a range. All of them must be deregistered
// before the protection domain or the memory goes.
type regionSet struct {
	mu      sync.Mutex    // guards the fields below
	changed chan struct{} // closed when a region is removed; nil unless something waits for that
	regions map[*Region]struct{}
	refused error // the first error of a device that did not deregister a region
}

// add adds a region that has been registered.
func (s *regionSet) add(r *Region) {
	s.mu.Lock()
	if s.regions == nil {
		s.regions = make(map[*Region]struct{})
	}
	s.regions[r] = struct{}{}
	s.mu.Unlock()
}

// remove removes r after the device has deregistered it, or has refused with err.
func (s *regionSet) remove(r *Region, err error) {
	s.mu.Lock()
	delete(s.regions, r)
	if s.refused == nil {
		s.refused = err
	}
	if s.changed != nil {
		close(s.changed)
		s.changed = nil
	}
	s.mu.Unlock()
}

func (s *regionSet) list() []*Region {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Keys(s.regions))
}

// invalidateAll takes all regions out of their cache, and waits until the device has deregistered those
// that are not in use. ErrInUse means that some are in use; any other error is that of a device that
// has not deregistered one.
func (s *regionSet) invalidateAll(cause Cause) error {
	for _, r := range s.list() {
		r.invalidate(cause)
	}
	s.dropped(nil)
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.regions) != 0 {
		return ErrInUse
	}
	return s.refused
}

// dropped waits until the regions that are being deregistered are removed, or late is closed.
func (s *regionSet) dropped(late <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for r := range s.regions {
		for r.refs.Load() == 0 {
			if _, registered := s.regions[r]; !registered {
				break
			}
			if s.changed == nil {
				s.changed = make(chan struct{})
			}
			changed := s.changed
			s.mu.Unlock()
			select {
			case <-changed:
				s.mu.Lock()
			case <-late:
				s.mu.Lock()
				return
			}
		}
	}
}
