package moving

import (
	"maps"
	"sync"

	"github.com/sanconn/san/session"
)

// TCP is the name of TCP in Counters.
const TCP = "tcp"

// Counters is the type behind san.Counters, which documents the fields.
type Counters struct {
	Dialed, Accepted     map[string]uint64
	Open                 map[string]int
	Fallbacks, Listeners map[session.Reason]uint64
	Refused              uint64
}

// counters change a few times for each connection, which costs far more than the lock.
var counters = struct {
	mu       sync.Mutex
	Counters // guarded by mu
}{Counters: Counters{
	Dialed:    map[string]uint64{},
	Accepted:  map[string]uint64{},
	Open:      map[string]int{},
	Fallbacks: map[session.Reason]uint64{},
	Listeners: map[session.Reason]uint64{},
}}

// Count changes the counters.
func Count(change func(*Counters)) {
	counters.mu.Lock()
	defer counters.mu.Unlock()
	change(&counters.Counters)
}

// Counted returns a snapshot of the counters.
func Counted() Counters {
	counters.mu.Lock()
	defer counters.mu.Unlock()
	c := counters.Counters
	c.Dialed, c.Accepted, c.Open = maps.Clone(c.Dialed), maps.Clone(c.Accepted), maps.Clone(c.Open)
	c.Fallbacks, c.Listeners = maps.Clone(c.Fallbacks), maps.Clone(c.Listeners)
	return c
}
