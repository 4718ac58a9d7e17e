package san

import (
	"fmt"
	"io"

	"github.com/sanconn/san/session"
)

// Dump writes what sanconn.Conn.Debug says of each connection of the process that has moved to a
// SAN, is about to, or was closed and still delivers, and how many wait for their move. It is
// for people who look at a stuck process: docs/DEBUGGING.md shows how to have it when one asks
// for it. It may be called at any time, waits for no connection, and returns the first error of w.
func Dump(w io.Writer) error {
	waiting, running := "busy", "busy"
	if session.LockSoon(&movers.mu) {
		waiting, running = fmt.Sprint(movers.waiting), fmt.Sprint(movers.running)
		movers.mu.Unlock()
	}
	if _, err := fmt.Fprintf(w, "moves: %s under way, %s wait for their turn\n", running, waiting); err != nil {
		return err
	}
	return session.Dump(w)
}
