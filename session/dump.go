package session

import (
	"cmp"
	"io"
	"slices"
	"sync"
	"sync/atomic"
)

// numbers is the number of the last session. Trace and Debug use these numbers.
var numbers atomic.Uint64

// live has, by number, the sessions of this process that hold anything, until Closed: including those
// that negotiate, and those that deliver what was written before Close.
var live sync.Map

// Dump writes Debug of each of this process's sessions, after the name that Name has set.
func Dump(w io.Writer) error {
	var all []*Session // the oldest first
	for _, s := range live.Range {
		all = append(all, s.(*Session))
	}
	slices.SortFunc(all, func(a, b *Session) int { return cmp.Compare(a.number, b.number) })
	for _, s := range all {
		text := s.Debug()
		if who := s.who.Load(); who != nil {
			text = (*who)() + text
		}
		if _, err := io.WriteString(w, text); err != nil {
			return err
		}
	}
	return nil
}
