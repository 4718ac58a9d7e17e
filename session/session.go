// Package session implements the session protocol: a reliable byte stream with
// TCP's semantics over an Endpoint, which moves messages and accesses remote
// memory. It knows neither devices nor net.Conn: sanconn uses it from above,
// and the providers implement Endpoint below it.
//
// A Write (write.go) puts its bytes into a message or the box, or offers the memory they
// lie in; Reserve (loan.go) lends the memory instead, and the caller fills it. The sender
// (sender.go, outbox.go, offer.go) keeps what goes to the peer, in its order. A look
// (look.go) takes what has come from the endpoint to the receiver (receiver.go, inbox.go,
// tail.go, fetch.go), from which a Read (read.go) copies, or Peek lends. These parts
// neither lock nor wait: Session does, the latter in one place (await.go). Messages are
// encoded in internal/wire, credits counted in internal/credit, and internal/spin decides
// how a wait polls. The janitor (janitor.go) looks while no Read or Write does.
package session

import (
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sanconn/san/session/internal/credit"
	"github.com/sanconn/san/session/internal/wire"
)

// Session is one end of a connection. All methods are safe for concurrent use;
// Reads are served one at a time, and so are Writes.
//
// Locks, in this order: rd.op, wr.op, ur.op (held for a whole operation), rxMu,
// txMu (held briefly: at most for a copy of boxMost bytes or the provider's
// Revoke; nothing waits under them, except for registering memory when
// RLIMIT_MEMLOCK is used up: docs/ARCHITECTURE.md).
type Session struct {
	ep   Endpoint
	mem  Memory // nil: there is none
	lim  Limits
	cfg  Config
	kind kind
	spin time.Duration // how long a wait polls
	peer wire.Params   // set by Negotiate before any Read or Write

	rd, wr side
	ur     side // WriteUrgent, which overtakes a Write; its state is wr's

	credits credit.Counts

	rxMu sync.Mutex
	rx   receiver // guarded by rxMu, as are the endpoint's receiving methods

	txMu    sync.Mutex
	tx      sender      // guarded by txMu, as are the endpoint's sending methods
	txWaits atomic.Bool // tx.pending, for those who do not hold txMu

	failure  atomic.Pointer[error] // why the connection is over, set once
	giveBack sync.Once             // closes or aborts the endpoint; a second caller waits for the first

	idle    idleState
	alive   keepalive
	closing closing
	workers sync.WaitGroup // background service, and loans
	loans   atomic.Int32   // memory that the application has
}

// kind is what follows from how a provider buffers.
type kind struct {
	acks      bool   // bytes live in this process until the peer has them: its CloseAck says so
	probes    bool   // a dead peer is found by probing it
	writeWant Events // what a Write waits for while a Read looks for messages
	calm      time.Duration
	heapBox   int // largest box on the heap in bytes
}

var (
	ringKind  = kind{writeWant: SendReady, calm: busyTick}
	queueKind = kind{acks: true, probes: true, writeWant: SendReady | RecvReady, calm: calmTick, heapBox: heapBoxMost}
)

var (
	// ErrInterrupted means that InterruptRead or InterruptWrite ended a wait.
	ErrInterrupted = errors.New("session: interrupted")
	// ErrClosed means that this end was closed or, for Write, this direction.
	ErrClosed = errors.New("session: closed")
	// ErrNoUrgent means that there is no unread urgent data.
	ErrNoUrgent = errors.New("session: no urgent data")
)

// New starts a session on ep, which it owns from then on, and sends the
// negotiation message. It does not block. Negotiate must succeed before any Read
// or Write.
func New(ep Endpoint, cfg Config) *Session {
	s := &Session{ep: ep, mem: ep.Memory(), lim: ep.Limits(), cfg: cfg.withDefaults(), kind: queueKind}
	if s.lim.Ring() {
		s.kind = ringKind
	}
	for _, sd := range s.sides() {
		sd.op.next = make(chan struct{}, 1)
		sd.wake = make(chan struct{}, 1)
	}
	s.idle.away.Store(true)
	s.closing.done = make(chan struct{})
	if s.spin = s.cfg.Spin; s.spin == 0 {
		s.spin = s.lim.Spin
	}
	if s.cfg.Disable&FeaturePoll != 0 {
		s.spin = 0
	}
	var caps uint32
	if s.lim.CanRead && s.cfg.Disable&FeatureRDMARead == 0 {
		caps |= wire.CapRead
	}
	if s.lim.MaxExpose > 0 && s.cfg.Disable&FeatureRDMAWrite == 0 {
		caps |= wire.CapGrant
	}
	s.credits.Open(s.lim.Window)
	s.rx = receiver{msgs: ep, mem: s.mem, credits: &s.credits, lim: &s.lim, caps: caps, budget: s.cfg.ReceiveBudget}
	s.rx.urgentCh = make(chan struct{}, 1)
	s.tx = sender{msgs: ep, mem: s.mem, credits: &s.credits, maxRDMA: s.lim.MaxRDMA}
	s.tx.boxLimit = min(s.cfg.SendBudget, s.kind.heapBox)
	ep.Start(s)
	s.introduce()
	return s
}

func (s *Session) sides() [3]*side { return [...]*side{&s.rd, &s.wr, &s.ur} }

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

// signalAll has all operations look again.
func (s *Session) signalAll() {
	for _, sd := range s.sides() {
		sd.signal()
	}
}

// InterruptRead(true) makes waiting and later Reads fail with ErrInterrupted,
// until InterruptRead(false).
func (s *Session) InterruptRead(on bool) { s.rd.interrupt(on) }

// InterruptWrite is InterruptRead for Write, WriteBuffers, Reserve and WriteUrgent.
func (s *Session) InterruptWrite(on bool) {
	s.wr.interrupt(on)
	s.ur.signal()
}

// Limits returns the limits of the endpoint.
func (s *Session) Limits() Limits { return s.lim }

// fail records why the connection is over and wakes all operations. What was not
// taken from the endpoint yet is lost, unless the peer's stream has already ended.
// It may be called with any lock held.
func (s *Session) fail(err error) {
	if s.failure.CompareAndSwap(nil, &err) {
		s.signalAll()
	}
}

// kill ends the connection at once: the endpoint is aborted. No lock may be held.
func (s *Session) kill(err error) {
	s.fail(err)
	s.detach(s.ep.Abort)
}

// brokeProtocol is why a connection is over whose peer has broken the protocol.
func brokeProtocol(err error) error {
	return fmt.Errorf("session: the peer broke the protocol: %w: %w", err, syscall.ECONNRESET)
}

// over returns why the connection is over for Write: the session's own reason, else
// the endpoint's. It is nil while the connection lives.
func (s *Session) over() error {
	if p := s.failure.Load(); p != nil {
		return *p
	}
	if err := s.ep.Err(); err != nil {
		return connErr(err)
	}
	return nil
}

// connErr turns an endpoint's orderly end into what a writer sees: EPIPE.
func connErr(err error) error {
	if errors.Is(err, io.EOF) {
		return fmt.Errorf("session: the peer's process has ended: %w", syscall.EPIPE)
	}
	return err
}

// unlockTx ends a use of the sender, and does what it has found to be due.
func (s *Session) unlockTx() {
	tx := &s.tx
	if waits := tx.pending(); waits != s.txWaits.Load() {
		s.txWaits.Store(waits)
	}
	wake, fault := tx.wake, tx.fault
	tx.wake = false
	s.txMu.Unlock()
	if fault != nil {
		s.fail(brokeProtocol(fault))
	}
	if wake {
		s.wakeWriters()
	}
}

// wakeWriters has those look again that wait for room or credit.
func (s *Session) wakeWriters() {
	s.wr.signalSleeper()
	s.ur.signalSleeper()
}

// withSender uses the sender.
func (s *Session) withSender(use func(*sender)) {
	s.txMu.Lock()
	use(&s.tx)
	s.unlockTx()
}

// sendControl sends a control message, now or as soon as there is room. It may
// be called with rxMu held.
func (s *Session) sendControl(c wire.Control) {
	s.withSender(func(tx *sender) { tx.owe(c) })
}

// flush sends what waits. It may be called with rxMu held.
func (s *Session) flush() { s.withSender((*sender).flush) }
