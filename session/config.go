package session

import (
	"cmp"
	"time"

	"github.com/sanconn/san/internal/trace"
)

// Config tunes a session. The zero value suits most callers. Rules such as D12, here and elsewhere, are
// those of docs/MODEL.md.
type Config struct {
	// sanconn.Options documents these fields.

	Threshold     int           // smallest Write in bytes that goes by rendezvous; 0: as the provider prefers; negative: none
	ReceiveBudget int           // offered bytes that are fetched ahead of any Read, and the largest inbox; default 4 MiB
	SendBudget    int           // bytes that Write takes before the peer has them: the largest send buffer, unless the provider is a ring; default 4 MiB
	Spin          time.Duration // how long Read and Write poll before they sleep; 0: as the provider prefers; negative: not at all
	KeepAlive     time.Duration // from one probe of a silent peer to the next, at least 1 s; default 15 s; negative: no probes; not used on a ring
	CancelTimeout time.Duration // for a peer that has to stop a transfer; then the connection is aborted (D12); default 2 s
	CloseTimeout  time.Duration // for the delivery of what was written before Close; default 10 s
	Disable       Feature       // for tests and for operators (SAN_DISABLE)

	// Accepting: the peer is the dialer, and negotiates first. Nothing is sent until its message has
	// come.
	Accepting bool

	// OnNote is called in a goroutine of the session, one call at a time: for each note of the peer
	// (SendNote) in their order, even while no Read waits; with nil, when the connection is over and no
	// operation is there to find that out; and with an empty note, when a Write has waited for a second
	// or two for memory that other connections have used up (Starver). OnNote may call the session;
	// Closed waits for its return. If it is nil, a note breaks the protocol.
	OnNote func(note []byte)

	// Trace gets a line for each step of the session (SAN_TRACE); nil: none.
	Trace *trace.Log
}

// defaultBudget is the size to which TCP's send buffer may grow on Linux (tcp_wmem). A much smaller
// send buffer is full, or empty, too often.
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
	FeatureRDMAWrite                     // rdmawrite: the send buffer, by RDMA write
	FeatureRegCache                      // regcache: cached registrations
	FeaturePoll                          // poll: polling before a sleep
	FeatureWindows                       // windows: memory windows
	FeatureRelaxed                       // relaxed: PCIe's relaxed ordering
)

// FeatureNames maps the names in SAN_DISABLE to features. Do not modify it.
var FeatureNames = map[string]Feature{
	"rdmaread": FeatureRDMARead, "rdmawrite": FeatureRDMAWrite,
	"regcache": FeatureRegCache, "poll": FeaturePoll,
	"windows": FeatureWindows, "relaxed": FeatureRelaxed,
}
