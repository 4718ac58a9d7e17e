// Package twin is the Endpoint without a kernel: two ends in one process, a
// wire of timers between them, and every choice that a network, a NIC or a
// dying peer could make taken from one seed. It is for tests: the session's
// simulations, the conformance suite endpointtest, and users who watch a
// protocol run in virtual time (it works inside testing/synctest's bubbles and
// outside of them). It never touches a device, and no program that moves real
// data should import it.
//
// The twin is as strict as the contract allows and never kinder. A buffer that
// was given back is overwritten; the target of an RDMA holds noise until its
// completion, and its source is read at the last moment; a message that finds
// no receive buffer, a call that the contract forbids and an access that a NIC
// would refuse are reported as Violations.
package twin

import (
	"fmt"
	"time"

	"github.com/sanconn/san/session"
)

// Config of a pair. The zero value is a ring, which has no remote memory, without
// faults.
type Config struct {
	// Seed of all choices. Each end draws from a stream of its own for each
	// kind of choice, so that a replay depends as little as possible on how
	// goroutines happen to be scheduled.
	Seed uint64

	// Limits of both ends. Provider defaults to "twin", MaxMessage to
	// 4096, and MaxRDMA to 1 MiB where CanRead or CanWrite is set; the other
	// zero values have no default.
	Limits session.Limits
	// PeerLimits, if not nil, are those of the second end.
	PeerLimits *session.Limits

	// SendQueue is the number of messages that may be under way from one end
	// where there is a Window; the last session.ControlReserve of them are
	// for control. Default twice that.
	SendQueue int
	// QueueBytes is the size of the ring in bytes where there is no Window.
	// Default 64 KiB.
	QueueBytes int
	// RDMAQueue is the number of Reads and Writes whose completions have not
	// been polled. Default 8.
	RDMAQueue int
	// AllocBudget in bytes, for each end. Default 16 MiB.
	AllocBudget int
	// OfferFrom is the size in bytes from which memory pays, of both ends, until SetOfferFrom.
	OfferFrom int

	// MinLatency and MaxLatency bound the time that a message, a piece of an
	// RDMA or a notice of the peer's end takes.
	MinLatency, MaxLatency time.Duration

	Faults Faults

	// Violated is called for every violation, with a lock held: it may log and
	// count, not call the endpoints. If it is nil, a violation panics.
	Violated func(Violation)
}

// Faults are shares of the calls or deliveries that go wrong, 0 to 1.
type Faults struct {
	Late   float64       // deliveries and completions that take LateBy longer
	LateBy time.Duration // default 100 times MaxLatency

	Expose  float64 // Exposes that fail with ENOMEM
	Local   float64 // Reads and Writes that fail with ENOMEM, as memory that is not from Alloc cannot be registered
	Alloc   float64 // Allocs that give nil
	Cheap   float64 // memory that pays whatever the size
	Evicted float64 // Reads and Writes that fail with ENOBUFS, as the registration of memory from Alloc was evicted and there is no room for another
	Busy    float64 // Reserves for data, Reads and Writes that find the queue full
	Tight   float64 // Reserves for control that find no room
	Short   float64 // Reserves for data that give less than max
	Stray   float64 // Arms and deliveries that cause a Wake for nothing
	Linger  float64 // calls before which the wire and the peer get on by some latencies
	// LingerFor is how long it may take in real time, not in a bubble, though nothing
	// more happens. Who has waited for a sync.Mutex for more than a millisecond is
	// given it before its holder can take it once more.
	LingerFor time.Duration

	// DieAt is, for each end, the number of calls into it at which its
	// process dies; 0: it does not.
	DieAt [2]int
}

// Violation of the contract, or what a NIC would have refused.
type Violation struct {
	Kind ViolationKind
	End  int // the end to blame, 0 or 1
	Text string
}

func (v Violation) String() string { return fmt.Sprintf("end %d: %v: %s", v.End, v.Kind, v.Text) }

// ViolationKind is a Violation's type.
type ViolationKind uint8

const (
	// Misuse of the contract by the caller of the endpoint to blame.
	Misuse ViolationKind = iota + 1
	// RNR: a message found no receive buffer; its sender is to blame.
	RNR
	// BadAccess outside of what was exposed, or beyond its rights, or with an
	// unknown key; the end that posted it is to blame.
	BadAccess
	// RevokedAccess: the descriptor was valid once. Either end may be to
	// blame, the one that posted the access is named; it is no fault where
	// the owner of the memory ends the connection.
	RevokedAccess
)

func (k ViolationKind) String() string {
	return [...]string{"?", "misuse", "no receive buffer", "bad access", "access to revoked memory"}[k]
}

const (
	defaultMessage   = 4096
	defaultRDMA      = 1 << 20
	defaultSendQueue = 2 * session.ControlReserve
	defaultRing      = 64 << 10
	defaultRDMAQueue = 8
	defaultBudget    = 16 << 20
	lateFactor       = 100
)

// Pair returns two connected ends.
func Pair(cfg Config) (a, b *Endpoint) {
	peer := cfg.Limits
	if cfg.PeerLimits != nil {
		peer = *cfg.PeerLimits
	}
	orInt(&cfg.SendQueue, defaultSendQueue)
	orInt(&cfg.QueueBytes, defaultRing)
	orInt(&cfg.RDMAQueue, defaultRDMAQueue)
	orInt(&cfg.AllocBudget, defaultBudget)
	if cfg.Faults.LateBy == 0 {
		cfg.Faults.LateBy = lateFactor * cfg.MaxLatency
	}
	if cfg.SendQueue <= session.ControlReserve {
		panic("twin: SendQueue leaves no room for data")
	}
	w := &wire{cfg: cfg, start: time.Now()}
	w.ends = [2]*Endpoint{newEndpoint(w, 0, cfg.Limits), newEndpoint(w, 1, peer)}
	return w.ends[0], w.ends[1]
}

func orInt(p *int, def int) {
	if *p == 0 {
		*p = def
	}
}
