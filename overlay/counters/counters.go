// Package counters publishes san.Stats by expvar, as "sanbuild": a program may publish "san"
// itself, and expvar ends one that publishes a name twice. The command san links it into programs
// that have expvar already: to others it would add a page.
package counters

import (
	"expvar"

	"github.com/sanconn/san"
)

func init() {
	expvar.Publish("sanbuild", expvar.Func(func() any { return named(san.Stats()) }))
}

// counters are san.Counters with the names of the reasons, as operators know them.
type counters struct {
	san.Counters
	Fallbacks, Listeners map[string]uint64
}

func named(c san.Counters) counters {
	return counters{c, names(c.Fallbacks), names(c.Listeners)}
}

func names(byReason map[san.Reason]uint64) map[string]uint64 {
	all := make(map[string]uint64, len(byReason))
	for reason, n := range byReason {
		all[reason.String()] += n
	}
	return all
}
