package ring

import "github.com/sanconn/san/provider/shm/internal/quota"

const (
	// Start is a ring's first limit in bytes, small so that an idle connection commits
	// little memory.
	Start = 64 << 10

	// Sure is the limit that a ring may reach when nothing is left of the budget, out of as
	// much again that is for this alone. Without it two programs that each write 512 KiB before
	// they read, which works over TCP, would wait for each other for ever: so much, and a
	// largest message for headers and for the pad at the ring's end. The largest message fits
	// from 256 KiB on.
	Sure = 512<<10 + MaxMessage
)

// Budget bounds the bytes by which all rings that this process writes grow beyond Start, and
// shares them among the users whose processes are to read them (package quota). What rings
// take on their way to Sure counts, but is granted up to twice the budget. It is safe for
// concurrent use.
type Budget struct {
	most int64
	pool *quota.Pool
}

// NewBudget makes a budget of so many bytes.
func NewBudget(most int64) *Budget { return &Budget{most, quota.New(2 * most)} }

// Most is how many bytes there are, without as many again that are on the way to Sure.
func (b *Budget) Most() int64 { return b.most }

// Used is how many bytes are in use.
func (b *Budget) Used() int64 { return b.pool.Used() }

// Exceeded reports whether more is in use than there is.
func (b *Budget) Exceeded() bool { return b.Used() > b.most }

// Of is what there is for the rings that one user's processes read.
func (b *Budget) Of(user quota.Holder) Share { return Share{b, user} }

// Share is a user's part of a budget.
type Share struct {
	*Budget
	user quota.Holder
}

// Take takes n more bytes; sure: on the way to Sure.
func (s Share) Take(n int64, sure bool) bool {
	limit := s.most
	if sure {
		limit *= 2
	}
	return s.pool.TakeWithin(limit, s.user, n)
}

// HasSure reports whether one more ring could grow from Start to Sure.
func (s Share) HasSure() bool { return s.pool.Has(s.user, Sure-Start) }

// Charge adds n bytes to what is in use, whatever there is left; less than 0: it takes them away.
func (s Share) Charge(n int64) { s.pool.Charge(s.user, n) }

// Return gives back what a ring has taken of which pages bytes could have memory.
func (s Share) Return(pages uint64) { s.pool.Return(s.user, int64(max(pages, Start)-Start)) }
