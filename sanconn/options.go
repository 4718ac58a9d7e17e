package sanconn

import (
	"time"

	"github.com/sanconn/san/session"
)

// Options tune connections over a SAN. The zero value is what most callers want: each
// field that is 0 has its default.
type Options struct {
	// AttemptTimeout bounds one attempt of a dialer's connection to move to a SAN. Default 2 s,
	// or 10 s with the policy Require, where the dial waits for it. A listener does not use it.
	AttemptTimeout time.Duration

	// MoveAtOnce has a dialer's connections move as soon as they have been accepted, rather
	// than once it pays: for connections that are known to live, and for tests. One that was not
	// accepted within AttemptTimeout moves once it has been used for four times as much as
	// without this.
	MoveAtOnce bool

	// Threshold is the size in bytes from which a Write is moved by RDMA straight out
	// of the caller's slice instead of through a buffer. Default: 1 MiB, or some 5 MiB where
	// this host copies faster than a line takes bytes, and then from the second to ninth Write of
	// the same memory on, by how many copies registering it costs; where there are no memory
	// windows, only if that costs no more than one copy. A value that is set counts from the first
	// Write on, as 2 KiB if it is less; negative: never. Not used on shm, where all bytes go
	// through the ring.
	Threshold int

	// ReceiveBudget is how many bytes of large Writes the receiving end takes before
	// anybody reads them, as TCP's receive buffer does. On verbs it is also the size of
	// the memory that the peer may write to, which comes beside it and has at most 4 MiB.
	// Default 4 MiB per connection. Not used on shm.
	ReceiveBudget int

	// SendBudget is how many bytes Write takes before the peer has them, as TCP's send
	// buffer does. Default 4 MiB per connection, which is also the most. Not used on shm, where
	// the ring is the buffer. On verbs both budgets come out of regcache.DefaultArena; where
	// that is short, they are smaller, and where it is used up bytes go as messages.
	SendBudget int

	// Spin is how long Read and Write poll before they sleep. Default 50 µs. Negative: they
	// do not poll, which saves CPU and costs latency.
	Spin time.Duration

	// KeepAlive is the time after which a silent peer is probed, and the time between two
	// probes. Three in a row without an answer end the connection with ETIMEDOUT. Default
	// 15 s, at least 1 s; negative: never. Not used on shm, where the kernel reports at once
	// that a peer has died.
	KeepAlive time.Duration

	// CancelTimeout bounds how long a deadline or Close waits for the peer to stop an
	// RDMA transfer that is under way; then the connection is reset. Default 2 s.
	CancelTimeout time.Duration

	// CloseTimeout bounds how long a closed connection goes on delivering what was
	// written; then it is reset and the rest is lost. Default 10 s.
	CloseTimeout time.Duration

	// Disable switches optional mechanisms off, in addition to those in SAN_DISABLE.
	Disable Feature
}

// Feature is a set of optional mechanisms.
type Feature = session.Feature

// The mechanisms that Options.Disable and, by the names behind them, SAN_DISABLE switch
// off. On shm there is only FeaturePoll; the others have no effect there.
const (
	FeatureRDMARead  = session.FeatureRDMARead  // "rdmaread": large Writes go by the peer's RDMA reads
	FeatureRDMAWrite = session.FeatureRDMAWrite // "rdmawrite": other than small Writes go through the send buffer, by RDMA writes
	FeatureRegCache  = session.FeatureRegCache  // "regcache": registrations that are kept
	FeaturePoll      = session.FeaturePoll      // "poll": polling before a sleep
	FeatureWindows   = session.FeatureWindows   // "windows": memory windows
	FeatureRelaxed   = session.FeatureRelaxed   // "relaxed": PCIe's relaxed ordering of what arrives
)
