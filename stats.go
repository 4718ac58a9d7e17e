package san

import (
	"maps"
	"sync"
)

// Counters are process-wide, since its start.
type Counters struct {
	// Dialed and Accepted count connections by provider, "tcp" being one.
	Dialed, Accepted map[string]uint64
	// Open is how many connections over a SAN are open now, by provider.
	Open map[string]int
	// Fallbacks counts the connections that are not on a SAN, by reason.
	Fallbacks map[Reason]uint64
	// Listeners counts what listeners do not have, by reason: the listeners that have
	// no SAN, and each provider that was there and refused (see Listener.Unavailable).
	Listeners map[Reason]uint64
	// Refused counts what Listeners of this process refused: SAN connections that
	// arrived beyond the backlog, and TCP connections where the policy is Require.
	// What a provider refuses before it has made a connection is not among them.
	Refused uint64
}

// Stats is a snapshot of the process's counters.
func Stats() Counters {
	counters.mu.Lock()
	defer counters.mu.Unlock()
	c := counters.Counters
	c.Dialed = maps.Clone(c.Dialed)
	c.Accepted = maps.Clone(c.Accepted)
	c.Open = maps.Clone(c.Open)
	c.Fallbacks = maps.Clone(c.Fallbacks)
	c.Listeners = maps.Clone(c.Listeners)
	return c
}

// counters change once per connection, which costs far more than the lock.
var counters = struct {
	mu       sync.Mutex
	Counters // guarded by mu
}{Counters: Counters{
	Dialed:    map[string]uint64{},
	Accepted:  map[string]uint64{},
	Open:      map[string]int{},
	Fallbacks: map[Reason]uint64{},
	Listeners: map[Reason]uint64{},
}}

// count changes the counters.
func count(change func(*Counters)) {
	counters.mu.Lock()
	defer counters.mu.Unlock()
	change(&counters.Counters)
}
