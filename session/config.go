package session

import (
	"cmp"
	"time"

	"github.com/sanconn/san/internal/trace"
)

// Config tunes a session. The zero value is what most callers want. Rules such as
// D12, here and elsewhere, are those of docs/MODEL.md.
type Config struct {
	// Threshold is the smallest Write, in bytes, that goes by rendezvous.
	// 0: what the provider prefers; negative: none does.
	Threshold int

	// ReceiveBudget is how many offered bytes are fetched ahead of any Read, so
	// that the peer's Write completes as it would into TCP's socket buffers, and
	// the largest size of the inbox. Default 4 MiB.
	ReceiveBudget int

	// SendBudget is how many bytes Write takes over before the peer has them: the largest
	// size of the box. Default 4 MiB. Not used on a ring, which is the buffer.
	SendBudget int

	// Spin is how long Read and Write poll before they sleep. 0: what the
	// provider prefers; negative: they do not poll.
	Spin time.Duration

	// KeepAlive is the idle time after which the peer is probed, and the time
	// between probes, at least 1 s; after three unanswered probes the connection
	// fails with ETIMEDOUT. Default 15 s; negative: no probes. Not used on a ring,
	// which detects dead peers itself.
	KeepAlive time.Duration

	// CancelTimeout bounds the wait for a peer that has to stop an RDMA
	// transfer, before the connection is aborted (D12). Default 2 s.
	CancelTimeout time.Duration

	// CloseTimeout bounds how long a closed connection goes on delivering what
	// was written. Default 10 s.
	CloseTimeout time.Duration

	// Accepting: the peer is the dialer, and negotiates first. Until its message has
	// come, nothing is sent.
	Accepting bool

	// OnNote is called for each note of the peer (SendNote), in a goroutine of the session, one
	// at a time and in their order, whether or not anybody reads; and with nil when the
	// connection is over and no operation is there to find out. It may call the session;
	// Closed waits for its return. Nil: a note breaks the protocol.
	OnNote func(note []byte)

	// Trace gets a line for each step of the session (SAN_TRACE); nil: none.
	Trace *trace.Log

	// Disable switches features off, for tests and for operators
	// (SAN_DISABLE).
	Disable Feature
}

// defaultBudget is the size to which TCP's send buffer may grow on Linux (tcp_wmem).
// With much less a box is full, or empty, too often.
const defaultBudget = 4 << 20

func (c Config) withDefaults() Config {
	c.ReceiveBudget = cmp.Or(max(c.ReceiveBudget, 0), defaultBudget)
	c.SendBudget = cmp.Or(max(c.SendBudget, 0), defaultBudget)
	c.KeepAlive = cmp.Or(c.KeepAlive, defaultKeepAlive)
	c.CancelTimeout = cmp.Or(max(c.CancelTimeout, 0), 2*time.Second)
	c.CloseTimeout = cmp.Or(max(c.CloseTimeout, 0), 10*time.Second)
	return c
}

// Feature is a set of optional mechanisms.
type Feature uint16

const (
	FeatureRDMARead  Feature = 1 << iota // rdmaread: rendezvous by RDMA read
	FeatureRDMAWrite                     // rdmawrite: the box, by RDMA write
	FeatureRegCache                      // regcache: keeping registrations
	FeaturePoll                          // poll: spinning before sleep
	FeatureWindows                       // windows: memory windows
	FeatureRelaxed                       // relaxed: PCIe's relaxed ordering
)

// FeatureNames maps the names in SAN_DISABLE to features. Do not modify it.
var FeatureNames = map[string]Feature{
	"rdmaread": FeatureRDMARead, "rdmawrite": FeatureRDMAWrite,
	"regcache": FeatureRegCache, "poll": FeaturePoll,
	"windows": FeatureWindows, "relaxed": FeatureRelaxed,
}
