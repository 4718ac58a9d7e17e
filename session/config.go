package session

import "time"

// Config tunes a session. The zero value is what most callers want.
type Config struct {
	// Threshold is the size in bytes of a Write from which its bytes move by
	// rendezvous; 0: what the provider prefers; negative: never.
	Threshold int

	// ReceiveBudget is how many bytes of offered memory are fetched though
	// nobody reads, so that the peer's Write completes as it would into TCP's
	// socket buffers. Default 4 MiB.
	ReceiveBudget int

	// SendBudget is how many bytes Write takes over before the peer has them;
	// 256 KiB where the provider has no memory left. Default 4 MiB. Not used where the
	// provider buffers.
	SendBudget int

	// Spin is how long Read and Write poll before they sleep; 0: what the
	// provider prefers; negative: not at all.
	Spin time.Duration

	// KeepAlive is the idle time after which the peer is asked whether it
	// lives, and the time between two questions; three unanswered questions
	// end the connection with ETIMEDOUT. Default 15 s; negative: never. Not
	// used where the provider finds dead peers by itself.
	KeepAlive time.Duration

	// CancelTimeout bounds the wait for a peer that has to stop an RDMA
	// transfer, before the connection is aborted (D12). Default 2 s.
	CancelTimeout time.Duration

	// CloseTimeout bounds how long a connection that was closed goes on
	// delivering what was written (only where the provider does not buffer).
	// Default 10 s.
	CloseTimeout time.Duration

	// Disable switches features off, for tests and for operators
	// (SAN_DISABLE).
	Disable Feature
}

// defaultBudget is what TCP's send buffer may grow to on Linux. With a half or a
// quarter of it a box is full, or empty, too often (docs/PERFORMANCE.md, RDMA).
const defaultBudget = 4 << 20

func (c Config) withDefaults() Config {
	if c.ReceiveBudget <= 0 {
		c.ReceiveBudget = defaultBudget
	}
	if c.SendBudget <= 0 {
		c.SendBudget = defaultBudget
	}
	if c.KeepAlive == 0 {
		c.KeepAlive = defaultKeepAlive
	}
	if c.CancelTimeout <= 0 {
		c.CancelTimeout = 2 * time.Second
	}
	if c.CloseTimeout <= 0 {
		c.CloseTimeout = 10 * time.Second
	}
	return c
}

// Feature is a set of optional mechanisms.
type Feature uint16

const (
	FeatureCMA       Feature = 1 << iota // cma: process_vm_readv on shm
	FeatureRDMARead                      // rdmaread: rendezvous by RDMA read
	FeatureRDMAWrite                     // rdmawrite: rendezvous by RDMA write
	FeatureInline                        // inline: payload in messages of what could go by rendezvous
	FeatureRegCache                      // regcache: keeping registrations
	FeaturePoll                          // poll: spinning before sleep
	FeatureSRQ                           // srq: shared receive queues
	FeatureWindows                       // windows: memory windows
)

// FeatureNames has the features by the names that SAN_DISABLE uses. It must not be
// changed.
var FeatureNames = map[string]Feature{
	"cma": FeatureCMA, "rdmaread": FeatureRDMARead, "rdmawrite": FeatureRDMAWrite,
	"inline": FeatureInline, "regcache": FeatureRegCache, "poll": FeaturePoll,
	"srq": FeatureSRQ, "windows": FeatureWindows,
}
