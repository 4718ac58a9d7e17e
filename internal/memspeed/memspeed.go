// Package memspeed measures how fast this host copies memory.
package memspeed

import (
	"sync"
	"time"
)

const (
	// Bytes is the size of the copy that Copying measures.
	Bytes = 1 << 20
	// tries is how often f is timed. The least time counts, as other work on the host only adds time.
	tries = 3
)

// Copying returns the least time of a copy of Bytes within the processor's caches. It is measured once.
// Tests may set it before its first call.
var Copying = sync.OnceValue(func() time.Duration {
	from, to := make([]byte, Bytes), make([]byte, Bytes)
	return Fastest(func() { copy(to, from) })
})

// Fastest returns the least time that f took in several calls, at least 1 ns.
func Fastest(f func()) time.Duration {
	f() // warms up pages and caches
	least := time.Duration(1 << 62)
	for range tries {
		began := time.Now()
		f()
		least = min(least, time.Since(began))
	}
	return max(least, 1)
}
