// Package twin is an Endpoint without a kernel: two ends in one process, a wire of timers between them,
// and one seed for every choice that a network, a NIC or a dying peer could make. It is for tests: the
// session's simulations, the conformance suite endpointtest, and users who watch a protocol run in
// virtual time (it works inside testing/synctest's bubbles and outside). It never touches a device, and
// no program that moves real data should import it.
//
// The twin is as strict as the contract allows. A buffer that was given back is overwritten. The target
// of an RDMA holds noise until its completion, and its source is read at the last moment. These are
// reported as Violations: a message that finds no receive buffer, a call that the contract forbids, and
// an access that a NIC would refuse.
package twin

import (
	"fmt"
	"time"

	"github.com/sanconn/san/session"
)

// Config of a pair. The zero value is a ring without remote memory and without faults.
type Config struct {
	// Seed of all choices. Each end has a random stream of its own for each kind of choice, so that a
	// replay depends as little as possible on how goroutines are scheduled.
	Seed uint64

	// Limits of both ends. Provider defaults to "twin", MaxMessage to 4096, and MaxRDMA to 1 MiB if
	// CanRead or CanWrite is set; the other fields have no default.
	Limits session.Limits
	// PeerLimits, if not nil, are the limits of the second end.
	PeerLimits *session.Limits

	// SendQueue is how many messages one end may have in flight if there is a Window; the last
	// session.ControlReserve of them are for control. Default: twice that.
	SendQueue int
	// QueueBytes is the size of the ring in bytes if there is no Window. Default 64 KiB.
	QueueBytes int
	// RDMAQueue is how many Reads and Writes may be posted without their completions having been
	// polled. Default 8.
	RDMAQueue int
	// AllocBudget is in bytes, for each end. Default 16 MiB.
	AllocBudget int
	// OfferFrom is the size in bytes from which memory pays, at both ends, until SetOfferFrom.
	OfferFrom int

	// MinLatency and MaxLatency bound the time of a message, a piece of an RDMA, or a notice of the
	// peer's end.
	MinLatency, MaxLatency time.Duration

	Faults Faults

	// Violated is called for every violation, with a lock held: it may log and count, but not call the
	// endpoints. If it is nil, a violation panics.
	Violated func(Violation)
}

// Faults are shares of the calls or deliveries that go wrong, 0 to 1.
type Faults struct {
	Late   float64       // deliveries and completions that take LateBy longer
	LateBy time.Duration // default 100 times MaxLatency

	Expose  float64 // Exposes that fail with ENOMEM
	Local   float64 // Reads and Writes that fail with ENOMEM, as for memory that is not from Alloc and cannot be registered
	Alloc   float64 // Allocs that return nil
	Cheap   float64 // memory that pays at any size
	Evicted float64 // Reads and Writes that fail with ENOBUFS, as for memory from Alloc whose registration was evicted and for which there is no room
	Busy    float64 // Reserves for data, Reads and Writes that find the queue full
	Tight   float64 // Reserves for control that find no room
	Short   float64 // Reserves for data that return less than max
	Stray   float64 // Arms and deliveries that cause a superfluous Wake
	Linger  float64 // calls before which the wire and the peer progress by some latencies
	// LingerFor is how long that may take in real time, outside a bubble, even if nothing more happens.
	// A goroutine that has waited for a sync.Mutex for more than a millisecond gets it before its
	// holder can lock it again.
	LingerFor time.Duration

	// DieAt is, for each end, the number of the call into it at which its process dies; 0: it does not
	// die.
	DieAt [2]int
}

// Violation of the contract, or an access that a NIC would have refused.
type Violation struct {
	Kind ViolationKind
	End  int // the end that is at fault, 0 or 1
	Text string
}

func (v Violation) String() string { return fmt.Sprintf("end %d: %v: %s", v.End, v.Kind, v.Text) }

// ViolationKind is a Violation's type.
type ViolationKind uint8

const (
	// Misuse of the contract by the caller of the endpoint.
	Misuse ViolationKind = iota + 1
	// RNR: a message found no receive buffer; its sender is at fault.
	RNR
	// BadAccess: outside what was exposed, beyond its rights, or with an unknown key; the end that
	// posted it is at fault.
	BadAccess
	// RevokedAccess: the descriptor was valid before. Either end may be at fault; the end that posted
	// the access is named. It is no fault if the owner of the memory is ending the connection.
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
