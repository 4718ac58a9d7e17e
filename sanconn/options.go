package sanconn

import (
	"time"

	"github.com/sanconn/san/session"
)

// Options tune the connections of a SAN. The zero value is what most callers
// want.
type Options struct {
	// AttemptTimeout bounds one attempt to connect over a SAN, negotiation
	// included, within the dialer's own timeout: what a destination that does
	// not answer costs before TCP is tried. Default 500 ms, and 10 s where the
	// policy is Require and there is nothing else to try; and no more than half
	// of what is left of the dialer's timeout, so that TCP has its time, or all
	// of it with Require. A destination that says nothing for that long is left
	// alone for 2 s, and each further time for twice as long, up to 64 s; for 2 s
	// if the attempt had less time, and not at all below 100 ms.
	AttemptTimeout time.Duration

	// LocalAddresses lets connections to addresses of this host other than
	// loopback use shared memory. Off by default, because such an address may
	// be redirected: IPVS keeps those of a cluster's services on a local
	// interface. Dialer and listener both need it.
	LocalAddresses bool

	// Threshold is the size in bytes of a Write from which its bytes are
	// moved by RDMA out of the caller's slice instead of through a buffer.
	// Default: never on shm; on verbs 256 KiB, or 2 MiB where there are no memory
	// windows. At least 2 KiB; negative: never. On shm it is process_vm_readv that
	// moves them, between processes of one user.
	Threshold int

	// ReceiveBudget is how many bytes of a large Write the receiving end
	// takes though nobody reads there, as TCP's receive buffer does; on verbs
	// also the size of the memory that the peer writes to. Default 4 MiB per
	// connection.
	ReceiveBudget int

	// SendBudget is how many bytes Write takes over before the peer has
	// them, as TCP's send buffer does. Default 4 MiB per connection; not used on
	// shm, where the ring is the buffer. On verbs both come out of the 64 MiB of
	// regcache.DefaultArena; where that is used up, it is 256 KiB of the heap.
	SendBudget int

	// Spin is how long Read and Write poll before they sleep. Default: 50 µs on
	// shm, on verbs the time of 40 wake-ups here, 20 µs to 5 ms; negative: not at
	// all, which saves CPU and costs latency.
	Spin time.Duration

	// KeepAlive is the time between two questions to a silent peer whether it
	// lives; the third that is not answered ends the connection with
	// ETIMEDOUT. Default 15 s, at least 1 s; negative: never. Not used on shm, where the
	// kernel tells at once when a peer dies.
	KeepAlive time.Duration

	// CancelTimeout bounds the wait for a peer that has to stop an RDMA
	// transfer because of a deadline or Close here, before the connection is
	// reset. Default 2 s.
	CancelTimeout time.Duration

	// CloseTimeout bounds how long a closed connection goes on delivering
	// what was written. Afterwards it is reset, and the rest lost. Default 10 s.
	CloseTimeout time.Duration

	// Disable switches optional mechanisms off, beside those that SAN_DISABLE
	// names.
	Disable session.Feature
}

// Session gives the part of the options that the session and the providers
// use.
func (o Options) Session() session.Config {
	return session.Config{
		Threshold:     o.Threshold,
		ReceiveBudget: o.ReceiveBudget,
		SendBudget:    o.SendBudget,
		Spin:          o.Spin,
		KeepAlive:     o.KeepAlive,
		CancelTimeout: o.CancelTimeout,
		CloseTimeout:  o.CloseTimeout,
		Disable:       o.Disable,
	}
}
