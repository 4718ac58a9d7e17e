package ring

import "sync/atomic"

const (
	// Start is a ring's first limit in bytes, small so that an idle connection commits
	// little memory.
	Start = 64 << 10

	// Sure is the limit that a ring may reach when nothing is left of the budget, out of as
	// much again that is for this alone. Without it two programs that each write 256 KiB in
	// the smallest messages before they read, which works over TCP, would wait for each other
	// for ever. The largest message fits from 256 KiB on.
	Sure = 512 << 10
)

// Budget bounds the bytes by which all rings that this process writes grow beyond Start.
// What rings take on their way to Sure counts, but is granted up to twice the budget.
// It is safe for concurrent use.
type Budget struct {
	most int64
	used atomic.Int64
}

// NewBudget makes a budget of so many bytes.
func NewBudget(most int64) *Budget { return &Budget{most: most} }

// Used is how many bytes are in use.
func (b *Budget) Used() int64 { return b.used.Load() }

// Exceeded reports whether more is in use than there is.
func (b *Budget) Exceeded() bool { return b.used.Load() > b.most }

// Take takes n more bytes; sure: on the way to Sure.
func (b *Budget) Take(n int64, sure bool) bool {
	most := b.most
	if sure {
		most *= 2
	}
	if b.used.Add(n) > most {
		b.used.Add(-n)
		return false
	}
	return true
}

// Return gives back what a ring has taken of which pages bytes could have memory.
func (b *Budget) Return(pages uint64) { b.used.Add(-int64(max(pages, Start) - Start)) }
