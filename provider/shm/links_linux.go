package shm

import (
	"context"
	"sync"
)

// links are all links of this process, for Idle.
var links linkSet

type linkSet struct {
	mu   sync.Mutex // guards what follows
	all  map[*link]struct{}
	none chan struct{} // closed when the last one goes; nil: nobody waits
}

func (s *linkSet) add(l *link) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.all == nil {
		s.all = make(map[*link]struct{})
	}
	s.all[l] = struct{}{}
}

func (s *linkSet) remove(l *link) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.all, l)
	if len(s.all) == 0 && s.none != nil {
		close(s.none)
		s.none = nil
	}
}

// Idle waits until this process has no link left: no goroutine, descriptor or mapping
// of this package except those of listeners. Links without connections end by
// themselves after a second or two, where nothing is unread; Idle is for tests and for programs that want to
// wait for that before they exit.
func Idle(ctx context.Context) error {
	links.mu.Lock()
	if len(links.all) == 0 {
		links.mu.Unlock()
		return nil
	}
	if links.none == nil {
		links.none = make(chan struct{})
	}
	none := links.none
	links.mu.Unlock()
	select {
	case <-none:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
