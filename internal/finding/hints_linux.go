package finding

import (
	"slices"
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

// Hint is of one port, but for nobodyAt.
type Hint struct {
	last   string   // who had the last connection; "": not known
	user   uint32   // … whose process that is
	Silent []string // who did not answer in time when asked last; replaced, and never written to

	nobodyAt time.Time // of a destination: when nobody was found for it
}

// setSilent notes whether one has not answered in time.
func (h *Hint) setSilent(name string, is bool) {
	h.Silent = slices.DeleteFunc(slices.Clone(h.Silent), func(s string) bool { return s == name })
	if is {
		h.Silent = append(h.Silent[max(0, len(h.Silent)+1-shm.MostNames):], name)
	}
}

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
