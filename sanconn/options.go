package sanconn

import (
	"time"

	"github.com/sanconn/san/session"
)

// Options tune connections over a SAN. The zero value suits most callers: each field that is 0 has its
// default.
type Options struct {
	// AttemptTimeout bounds one attempt to move a dialer's connection to a SAN. Default 2 s, or 10 s
	// with the policy Require, where the dial waits for it. A listener does not use it.
	AttemptTimeout time.Duration

	// MoveAtOnce makes a dialer's connections move as soon as they have been accepted, rather than once
	// it pays: for connections that are known to live long, and for tests. A connection that was not
	// accepted within AttemptTimeout moves after four times as much use as without this option.
	MoveAtOnce bool

	// Threshold is the size in bytes from which a Write is moved by RDMA directly from the caller's
	// slice instead of through a buffer. Default: 1 MiB, or some 6 MiB if this host copies faster than
	// a line takes bytes; and only from the second to ninth Write of the same memory on, depending on
	// how many copies registering it costs. Without memory windows, the default applies only if
	// registering costs no more than one copy. A value that is set applies from the first Write on;
	// less than 2 KiB counts as 2 KiB. Negative: never. Not used on shm, where all bytes go through the
	// ring.
	Threshold int

	// ReceiveBudget is how many bytes of large Writes the receiving end takes before they are read,
	// like TCP's receive buffer. On verbs it is also the size of the memory that the peer may write to,
	// of at most 4 MiB, which is in addition. Default 4 MiB per connection. Not used on shm.
	ReceiveBudget int

	// SendBudget is how many bytes Write takes before the peer has them, like TCP's send buffer.
	// Default 4 MiB per connection, which is also the most. Not used on shm, where the ring is the
	// buffer. On verbs both budgets come out of regcache.DefaultArena. If the arena is short, the
	// budgets are smaller; if it is used up, bytes go as messages.
	SendBudget int

	// Spin is how long Read and Write poll before they sleep. Default 50 µs. Negative: they do not
	// poll, which saves CPU time and increases latency.
	Spin time.Duration

	// KeepAlive is the time after which a silent peer is probed, and the time between two probes. Three
	// probes in a row without an answer end the connection with ETIMEDOUT. Default 15 s, at least 1 s;
	// negative: never. Not used on shm, where the kernel reports at once that a peer has died.
	KeepAlive time.Duration

	// CancelTimeout bounds how long a deadline or Close waits for the peer to stop an RDMA transfer in
	// progress; then the connection is reset. Default 2 s.
	CancelTimeout time.Duration

	// CloseTimeout bounds how long a closed connection goes on delivering what was written; then the
	// connection is reset and the rest is lost. Default 10 s.
	CloseTimeout time.Duration

	// Disable switches optional mechanisms off, in addition to those in SAN_DISABLE.
	Disable Feature
}

// Feature is a set of optional mechanisms.
type Feature = session.Feature

// The mechanisms that Options.Disable and, by the names in quotes, SAN_DISABLE switch off. On shm there
// is only FeaturePoll; the others have no effect there.
const (
	FeatureRDMARead  = session.FeatureRDMARead  // "rdmaread": large Writes go by the peer's RDMA reads
	FeatureRDMAWrite = session.FeatureRDMAWrite // "rdmawrite": Writes that are not small go through the send buffer, by RDMA writes
	FeatureRegCache  = session.FeatureRegCache  // "regcache": cached registrations
	FeaturePoll      = session.FeaturePoll      // "poll": polling before a sleep
	FeatureWindows   = session.FeatureWindows   // "windows": memory windows
	FeatureRelaxed   = session.FeatureRelaxed   // "relaxed": PCIe's relaxed ordering of arriving data
)
