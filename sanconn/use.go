package sanconn

import (
	"sync/atomic"

	"github.com/sanconn/san/internal/newconn"
)

// turn is for how many bytes a Read counts, beside those that it brings: what a round trip
// by a SAN saves is as much as what it saves for so many bytes.
const turn = 32 << 10

// usage is how much goes by TCP, until the connection moves.
type usage struct {
	bytes        atomic.Int64
	at           atomic.Int64 // beyond which it moves; newconn.Never while that is tried, until it has failed
	claimedUntil atomic.Int64 // up to which it does not, nor takes a proposal: see claimed
}

// add counts, and reports whether the connection is to move now.
func (u *usage) add(n int64) bool {
	switch bytes, at := u.bytes.Add(n), u.at.Load(); {
	case bytes < at:
		return false
	case u.claimed(): // in vain
		u.at.CompareAndSwap(at, u.claimedUntil.Load())
		return false
	}
	return u.begins()
}

// begins reports whether the connection is to be moved, unless that has been done.
func (u *usage) begins() bool { return u.at.Swap(newconn.Never) != newconn.Never }

// again has the connection move once it has been used for so many bytes more.
func (u *usage) again(bytes int64) { u.at.Store(min(u.bytes.Load()+bytes, newconn.Never)) }

// claim keeps the connection from moving before that.
func (u *usage) claim(bytes int64) {
	until := u.bytes.Load() + bytes
	u.claimedUntil.Store(until)
	if at := u.at.Load(); at < until {
		u.at.CompareAndSwap(at, until)
	}
}

// claimed reports whether the program may have taken the descriptor for itself, as event loops
// do: its own Read and Write have not been used since it had that for as much as Config.Threshold.
// What others have sent by then is the descriptor's.
func (u *usage) claimed() bool { return u.bytes.Load() < u.claimedUntil.Load() }
