package session

import (
	"cmp"
	"io"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
)

// numbers has the last session's number. Trace and Debug name sessions by them.
var numbers atomic.Uint64

// live are the sessions of this process that hold anything, until Closed: also those that
// negotiate, and those that deliver what was written before Close.
var live = liveSessions{all: make(map[uint64]*Session)}

type liveSessions struct {
	mu  sync.Mutex
	all map[uint64]*Session // by number; guarded by mu, under which nothing else is called
}

func (l *liveSessions) add(s *Session) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all[s.number] = s
}

func (l *liveSessions) remove(s *Session) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.all, s.number)
}

// list returns them, the oldest first.
func (l *liveSessions) list() []*Session {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.SortedFunc(maps.Values(l.all), func(a, b *Session) int { return cmp.Compare(a.number, b.number) })
}

// Dump writes Debug of each of this process's sessions, behind what its Name has said.
func Dump(w io.Writer) error {
	for _, s := range live.list() {
		text := s.Debug()
		if who := s.who.Load(); who != nil {
			text = (*who)() + text
		}
		if _, err := io.WriteString(w, text); err != nil {
			return err
		}
	}
	return nil
}
