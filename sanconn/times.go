package sanconn

import (
	"sync/atomic"
	"time"
)

// How long an end waits for its peer.
var (
	// backTimeout bounds how long the user of the descriptor waits for the peer to leave the session,
	// too, which takes some 100 µs, and processor time.
	backTimeout = newDuration(5 * time.Second)

	// answerTime is how long a peer that has not answered waits for room before its bytes are read. It
	// is less than a peer's Close waits for that.
	answerTime = newDuration(100 * time.Millisecond)

	// silentTimeout bounds how long the end of a stream waits for the answer to a proposal: the process
	// that got the proposal may not be the peer, which then knows nothing of it.
	silentTimeout = newDuration(closeTimeout)
)

// duration is a time that tests change, while goroutines of earlier tests may still read it.
type duration struct{ ns atomic.Int64 }

func newDuration(d time.Duration) *duration {
	x := new(duration)
	x.ns.Store(int64(d))
	return x
}

func (d *duration) get() time.Duration { return time.Duration(d.ns.Load()) }
