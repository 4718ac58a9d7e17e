package finding

import (
	"slices"
	"sync"
	"time"

	"github.com/sanconn/san/provider/shm"
)

// hints is what earlier searches have found out about the processes of a port. A hint may be about
// another address of the port, or about a process that has ended.
var hints struct {
	mu sync.Mutex // guards of
	of map[Place]*Hint
}

// mostHints bounds the hints. At the bound all of them are forgotten: a process seldom has so many
// destinations on its host.
const mostHints = 4096

// Hint is about one port, except nobodyAt, which is about one address and port.
type Hint struct {
	last   string   // the name of the process that had the last connection; "": not known
	user   uint32   // … and that process's user
	Silent []string // names of processes that did not answer their last proposal in time; replaced as a whole, never changed in place

	nobodyAt time.Time // when a search for this destination last found nobody
}

// setSilent notes whether the process with this name failed to answer in time.
func (h *Hint) setSilent(name string, is bool) {
	h.Silent = slices.DeleteFunc(slices.Clone(h.Silent), func(s string) bool { return s == name })
	if is {
		h.Silent = append(h.Silent[max(0, len(h.Silent)+1-shm.MostNames):], name)
	}
}

// Note changes the hint of a place.
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

// HintOf returns the hint of a place, or the zero Hint.
func HintOf(at Place) (hint Hint) {
	hints.mu.Lock()
	defer hints.mu.Unlock()
	if known := hints.of[at]; known != nil {
		hint = *known
	}
	return hint
}
