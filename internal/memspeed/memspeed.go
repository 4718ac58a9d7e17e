// Package memspeed measures how fast this host copies memory.
package memspeed

import (
	"sync"
	"time"
)

const (
	// Bytes is what Copying is about.
	Bytes = 1 << 20
	// tries: the fastest counts, as whatever else the host does only adds to it.
	tries = 3
)

// Copying is the least time that a copy of Bytes takes, of memory that the caches hold. It is measured
// once. Tests set it before anything calls it.
var Copying = sync.OnceValue(func() time.Duration {
	from, to := make([]byte, Bytes), make([]byte, Bytes)
	return Fastest(func() { copy(to, from) })
})

// Fastest returns the least time that f took in a few calls, at least 1 ns.
func Fastest(f func()) time.Duration {
	f() // pages and caches
	least := time.Duration(1 << 62)
	for range tries {
		began := time.Now()
		f()
		least = min(least, time.Since(began))
	}
	return max(least, 1)
}
