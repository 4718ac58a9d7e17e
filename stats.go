package san

import (
	"fmt"
	"io"

	"github.com/sanconn/san/internal/moving"
	"github.com/sanconn/san/session"
)

// Counters count for the whole process, since its start.
type Counters struct {
	// Dialed and Accepted count connections by provider: each connection as "tcp" at first, and once
	// more whenever it moves. Dials of other networks count by the network's name; connections that
	// listeners of other networks accept do not count.
	Dialed, Accepted map[string]uint64
	// Open is how many connections over a SAN are open now, by provider.
	Open map[string]int
	// Fallbacks counts, by reason, attempts to move that have failed within their time, even if the
	// other end agreed later; and connections that are net's own.
	Fallbacks map[Reason]uint64
	// Listeners counts, by reason, listeners without any SAN, and each provider that the host has but
	// that could not listen (see Listener.Unavailable).
	Listeners map[Reason]uint64
	// Refused counts connections that this process's Listeners with the policy Require have reset,
	// because they had not moved in time, had bytes on TCP before, or had to make room for others: see
	// ListenConfig.Backlog.
	Refused uint64
}

// Stats returns a snapshot of the process's counters. The caller owns the maps. It may be called
// concurrently.
func Stats() Counters { return Counters(moving.Counted()) }

// Dump writes what sanconn.Conn.Debug returns for each connection of the process that has moved to a
// SAN, is about to move, or was closed and still delivers; and how many connections wait for their
// move. It is for people who examine a stuck process: docs/DEBUGGING.md shows how to get it from a
// running program. It may be called at any time. It waits at most some milliseconds for each
// connection, and returns the first error of w.
func Dump(w io.Writer) error {
	waiting, running := "busy", "busy"
	if r, w, ok := moving.Queue.Counts(); ok {
		running, waiting = fmt.Sprint(r), fmt.Sprint(w)
	}
	if _, err := fmt.Fprintf(w, "moves: %s under way, %s wait for their turn\n", running, waiting); err != nil {
		return err
	}
	return session.Dump(w)
}
