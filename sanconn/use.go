package sanconn

import (
	"sync/atomic"

	"github.com/sanconn/san/internal/newconn"
)

// turn is how many bytes a Read counts as, in addition to those that it returns: a SAN saves about as
// much for a round trip as for so many bytes.
const turn = 32 << 10

// usage is how much TCP has carried, until the connection moves.
type usage struct {
	bytes        atomic.Int64
	at           atomic.Int64 // the use after which it moves; newconn.Never from the beginning of an attempt to its failure
	claimedUntil atomic.Int64 // the use up to which it neither moves nor accepts a proposal: see claimed
}

// add counts, and reports whether the connection is to move now.
func (u *usage) add(n int64) bool {
	switch bytes, at := u.bytes.Add(n), u.at.Load(); {
	case bytes < at:
		return false
	case u.claimed(): // too early
		u.at.CompareAndSwap(at, u.claimedUntil.Load())
		return false
	}
	return u.begins()
}

// begins reports whether the connection is to be moved, unless it was reported before.
func (u *usage) begins() bool { return u.at.Swap(newconn.Never) != newconn.Never }

// again makes the connection move after so many bytes more of use.
func (u *usage) again(bytes int64) { u.at.Store(min(u.bytes.Load()+bytes, newconn.Never)) }

// claim keeps the connection from moving before so many bytes more of use.
func (u *usage) claim(bytes int64) {
	until := u.bytes.Load() + bytes
	u.claimedUntil.Store(until)
	if at := u.at.Load(); at < until {
		u.at.CompareAndSwap(at, until)
	}
}

// claimed reports whether the program may have taken the descriptor for itself, as event loops do:
// since it had the descriptor, its own Read and Write have not been used for as much as
// Config.Threshold. What others have sent by then belongs to the descriptor.
func (u *usage) claimed() bool { return u.bytes.Load() < u.claimedUntil.Load() }
