// Package session implements the session protocol: a reliable byte stream with TCP's semantics over an
// Endpoint, which moves messages and accesses remote memory. It uses neither devices nor net.Conn:
// sanconn uses it from above, and the providers implement Endpoint below it.
//
// New makes a Session around an endpoint that a provider has connected. Negotiate comes next; Read,
// Write and the like after it; Close or Abort at the end, in any state.
//
// A Write (write.go) puts its bytes into a message or the send buffer, or offers the memory in which
// they are; Reserve (loan.go) lends the memory instead, and the caller fills it. The sender (sender.go,
// sendbuffer.go, offer.go) keeps what goes to the peer, in its order. The engine (progress.go) takes
// what has come from the endpoint to the receiver (receiver.go, inbox.go, inoffer.go, fetch.go), from
// which Read (read.go) copies, or Peek lends. These parts neither lock nor wait: core has the locks,
// and the engine waits, in one place (await.go). internal/wire encodes messages, internal/credit counts
// credits, and internal/spin decides how a wait polls. The idle poller (idle.go) polls while no Read or
// Write does.
//
// It is exported for the library's other parts. Its API may change in any version
// (docs/COMPATIBILITY.md).
package session

import (
	"errors"
	"sync"
	"sync/atomic"
	"time"
)

// Session is one end of a connection. All methods are safe for concurrent use; Reads are served one at
// a time, and so are Writes.
//
// It is made of layers, each of which uses those below it: core has the state and the locks; engine
// takes what comes from the endpoint, does what is due, and waits; reading and writing are the
// operations; Session begins and ends it all.
type Session struct {
	*engine
	reading
	writing

	negotiatedByPeer bool // the peer's negotiation message has come; guarded by rd's op
	alive            keepalive
	closing          closing

	began time.Time
	who   atomic.Pointer[func() string] // see Name

	epMu    sync.Mutex // held while Debug or Over use the endpoint
	retired bool       // the endpoint is retired, or about to be; guarded by epMu
}

// reading has the operations of the peer's direction, writing those of this end's.
type (
	reading struct {
		*engine
		trickle int // how many more Reads pause first, in a stream of small messages; guarded by rd.op
	}
	writing struct{ *engine }
)

var (
	// ErrInterrupted means that InterruptRead or InterruptWrite has ended a wait.
	ErrInterrupted = errors.New("session: interrupted")
	// ErrClosed means that this end was closed or, for Write, this direction.
	ErrClosed = errors.New("session: closed")
	// ErrNoUrgent means that there is no unread urgent data.
	ErrNoUrgent = errors.New("session: no urgent data")
)

// New starts a session on ep, which it owns from then on, and sends the negotiation
// message unless cfg.Accepting is set. It does not block. Negotiate must succeed before any
// Read or Write.
func New(ep Endpoint, cfg Config) *Session {
	e := &engine{newCore(ep, cfg.withDefaults())}
	s := &Session{engine: e, reading: reading{engine: e}, writing: writing{e}, began: time.Now()}
	s.closing.done = make(chan struct{})
	live.Store(s.number, s)
	s.ep.Start(s)
	if !cfg.Accepting {
		s.sendNegotiate()
	}
	return s
}

// Wake implements Waker for the endpoint.
func (s *Session) Wake(ev Events) {
	found := false
	for _, sd := range s.sides() {
		if sd.wants.Load()&uint32(ev) != 0 {
			sd.signal()
			found = true
		}
	}
	if !found {
		s.serve()
	}
}

// InterruptRead(true) makes waiting and later Reads fail with ErrInterrupted, until
// InterruptRead(false).
func (r *reading) InterruptRead(on bool) { r.rd.interrupt(on) }

// InterruptWrite is InterruptRead for Write, WriteBuffers, Reserve and WriteUrgent.
func (w *writing) InterruptWrite(on bool) {
	w.wr.interrupt(on)
	w.ur.signal()
}

// Limits returns the limits of the endpoint.
func (s *Session) Limits() Limits { return s.lim }
