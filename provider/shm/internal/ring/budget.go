package ring

import "github.com/sanconn/san/provider/shm/internal/quota"

const (
	// Start is a ring's first limit in bytes. It is small, so that an idle connection commits little
	// memory.
	Start = 64 << 10

	// Sure is the limit that a ring may reach when the budget is used up, out of an equal amount that
	// is kept for this. Otherwise two programs that each write 512 KiB before they read, which works
	// over TCP, would wait for each other for ever. It is 512 KiB, and a largest message for headers
	// and for the pad at the ring's end. The largest message fits from 256 KiB on.
	Sure = 512<<10 + MaxMessage
)

// Budget bounds the bytes by which all rings that this process writes grow beyond Start, and shares
// them among the users whose processes read the rings (package quota). Bytes by which rings grow to
// Sure count, but are granted up to twice the budget. It is safe for concurrent use.
type Budget struct {
	most int64
	pool *quota.Pool
}

// NewBudget returns a budget of so many bytes.
func NewBudget(most int64) *Budget { return &Budget{most, quota.New(2 * most)} }

// Most returns the budget in bytes, without the equal amount for growth to Sure.
func (b *Budget) Most() int64 { return b.most }

// Used returns how many bytes are in use.
func (b *Budget) Used() int64 { return b.pool.Used() }

// Exceeded reports whether more than Most bytes are in use.
func (b *Budget) Exceeded() bool { return b.Used() > b.most }

// Of returns the share for rings that are charged to a user.
func (b *Budget) Of(user quota.Holder) Share { return Share{b, user} }

// Share is a user's part of a budget.
type Share struct {
	*Budget
	user quota.Holder
}

// Take takes n more bytes, and reports whether it could. sure: for growth to Sure.
func (s Share) Take(n int64, sure bool) bool {
	limit := s.most
	if sure {
		limit *= 2
	}
	return s.pool.TakeWithin(limit, s.user, n)
}

// HasSure reports whether one more ring could grow from Start to Sure.
func (s Share) HasSure() bool { return s.pool.Has(s.user, Sure-Start) }

// Charge adds n bytes to those in use, even beyond the budget, or takes -n bytes away.
func (s Share) Charge(n int64) { s.pool.Charge(s.user, n) }

// Return gives back what a ring has taken; pages bytes of the ring could have memory.
func (s Share) Return(pages uint64) { s.pool.Return(s.user, int64(max(pages, Start)-Start)) }
