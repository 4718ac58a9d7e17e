package finding

import (
	"sync"
	"time"

	"github.com/sanconn/san/provider/shm"
)

// hints are what was found out of the processes of a port. They may be of another address, or of a
// process that has ended.
var hints struct {
	mu sync.Mutex // guards of
	of map[Place]*Hint
}

// mostHints bounds what is remembered; then all is forgotten. A process seldom has so many
// destinations on its host.
const mostHints = 4096

// Hint is of one port, but for free.
type Hint struct {
	last     int // who had the last connection
	known    bool
	Seen     Numbers   // who was there when asked last
	Silent   Numbers   // who did not answer in time then
	searched time.Time // when all were asked

	free time.Time // of a destination: when nobody was found for it
}

// Numbers is a set of processes' numbers.
type Numbers uint64

func (s Numbers) has(n int) bool { return s>>n&1 != 0 }

func (s *Numbers) Set(n int, in bool) {
	if *s &^= 1 << n; in {
		*s |= 1 << n
	}
}

var _ [64 - shm.Numbers]struct{} // they fit

// Note changes what is remembered of a place.
func Note(at Place, change func(*Hint)) {
	hints.mu.Lock()
	defer hints.mu.Unlock()
	hint := hints.of[at]
	if hint == nil {
		if len(hints.of) >= mostHints || hints.of == nil {
			hints.of = make(map[Place]*Hint)
		}
		hint = new(Hint)
		hints.of[at] = hint
	}
	change(hint)
}

// HintOf returns what is remembered of a place.
func HintOf(at Place) (hint Hint) {
	hints.mu.Lock()
	defer hints.mu.Unlock()
	if known := hints.of[at]; known != nil {
		hint = *known
	}
	return hint
}
