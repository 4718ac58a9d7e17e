// Package session implements the session protocol: a reliable byte stream with
// TCP's semantics over an Endpoint, which moves messages and accesses remote
// memory. It knows neither devices nor net.Conn: sanconn uses it from above,
// and the providers implement Endpoint below it.
//
// Write (send.go) puts bytes into a message, or offers the slice they lie in
// (rendezvous.go), or copies them to the peer's inbox (outbox.go, inbox.go). The
// peer's poll (receive.go) keeps the message, and its Read copies from it or has
// the offered bytes fetched (fetch.go). Negotiation is in negotiate.go, flow control
// in credit.go, waiting in wait.go, service while no Read or Write runs in idle.go,
// the end in close.go, the wire format in wire.go and docs/PROTOCOL.md.
package session

import (
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// Session is one end of a connection. All methods are safe for concurrent use;
// Reads are served one at a time, and so are Writes.
//
// Locks, in this order: rd.op, wr.op (held for a whole operation), rx.mu,
// tx.mu (held briefly: at most for a copy of boxMost bytes or the provider's
// Revoke; nothing waits under them, except for registering memory when
// RLIMIT_MEMLOCK is used up: docs/ARCHITECTURE.md).
type Session struct {
	ep   Endpoint
	mem  Memory // nil: there is none
	lim  Limits
	cfg  Config
	pace pollPace
	caps uint32 // capabilities that we announced
	peer params // the peer's, set by Negotiate before any Read or Write

	rd, wr side
	rx     receiver
	tx     sender

	credits creditCounts

	failure  atomic.Pointer[error] // why the connection is over, set once
	gone     bool                  // the endpoint is closed, or being closed; written under rx.mu and tx.mu, read under either
	giveBack sync.Once             // closes or aborts the endpoint; a second caller waits for the first

	idle    idleState
	alive   keepalive
	closing closing
	workers sync.WaitGroup // background service
}

// side is one direction, with the operation (Read or Write) in progress there.
type side struct {
	op    opLock        // held by the operation as long as it lasts
	state atomic.Uint32 // st bits: why it has to end
	wants atomic.Uint32 // Events to be woken for; 0: not sleeping
	wake  chan struct{} // holds one token: look again
	spin  spinHistory   // guarded by op

	beside atomic.Bool // rd only, on a device: a Write began during a Read

	sleeps, polls atomic.Uint64
}

const (
	stInterrupted = 1 << iota // by InterruptRead, InterruptWrite
	stShut                    // this direction was closed here
	stClosed                  // the session was closed here
	stPeerClosed              // wr only: the peer no longer reads
)

// opLock is a first-come, first-served mutex for long operations. Waiters sleep
// on a channel, because a goroutine blocked on a sync.Mutex keeps
// testing/synctest's clock from advancing, which may be what the holder waits for.
type opLock struct {
	users atomic.Int32  // the holder and those waiting
	next  chan struct{} // hands the lock to the next one
}

func (l *opLock) Lock() {
	if l.users.Add(1) > 1 {
		<-l.next
	}
}

func (l *opLock) Unlock() {
	if l.users.Add(-1) > 0 {
		l.next <- struct{}{}
	}
}

// tryLock locks l if it is free.
func (l *opLock) tryLock() bool { return l.users.CompareAndSwap(0, 1) }

// held reports whether an operation is in progress.
func (l *opLock) held() bool { return l.users.Load() > 0 }

func (sd *side) signal() {
	select {
	case sd.wake <- struct{}{}:
	default:
	}
}

func (sd *side) set(bits uint32) {
	sd.state.Or(bits)
	sd.signal()
}

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
	s := &Session{ep: ep, mem: ep.Memory(), lim: ep.Limits(), cfg: cfg.withDefaults(), pace: measurePace()}
	for _, sd := range []*side{&s.rd, &s.wr} {
		sd.op.next = make(chan struct{}, 1)
		sd.wake = make(chan struct{}, 1)
	}
	s.idle.away.Store(true)
	s.closing.done = make(chan struct{})
	s.rx.urgentCh = make(chan struct{}, 1)
	if s.cfg.Spin == 0 {
		s.cfg.Spin = s.lim.Spin
	}
	if s.cfg.Spin < 0 || s.cfg.Disable&FeaturePoll != 0 {
		s.cfg.Spin = 0
	}
	if s.cfg.Spin < pauseFor {
		s.pace.tries = int(time.Duration(s.pace.tries) * s.cfg.Spin / pauseFor)
	}
	if !s.lim.Ring() {
		s.pace.forDevice()
	}
	ep.Start(s)
	if s.lim.CanRead && s.cfg.Disable&FeatureRDMARead == 0 {
		s.caps |= capRead
	}
	if s.lim.MaxExpose > 0 && s.cfg.Disable&FeatureRDMAWrite == 0 {
		s.caps |= capGrant
	}
	s.introduce()
	return s
}

// Wake implements Waker for the endpoint.
func (s *Session) Wake(ev Events) {
	heard := false
	if s.rd.wants.Load()&uint32(ev) != 0 {
		s.rd.signal()
		heard = true
	}
	if s.wr.wants.Load()&uint32(ev) != 0 {
		s.wr.signal()
		heard = true
	}
	if !heard {
		s.idle.serve(s)
	}
}

// InterruptRead(true) makes waiting and later Reads fail with ErrInterrupted,
// until InterruptRead(false).
func (s *Session) InterruptRead(on bool) { s.rd.interrupt(on) }

// InterruptWrite is InterruptRead for Write and WriteBuffers.
func (s *Session) InterruptWrite(on bool) { s.wr.interrupt(on) }

func (sd *side) interrupt(on bool) {
	if on {
		sd.set(stInterrupted)
	} else {
		sd.state.And(^uint32(stInterrupted))
	}
}

// Limits returns the limits of the endpoint.
func (s *Session) Limits() Limits { return s.lim }

// fail records why the connection is over and wakes both directions. What was not
// taken from the endpoint yet is lost, unless the peer's stream has already ended.
// It may be called with any lock held.
func (s *Session) fail(err error) {
	if s.failure.CompareAndSwap(nil, &err) {
		s.rd.signal()
		s.wr.signal()
	}
}

// kill is fail, and aborts the endpoint before it returns: after that the peer
// touches no memory of this end. No lock may be held.
func (s *Session) kill(err error) {
	s.fail(err)
	s.detach(s.ep.Abort)
	s.rd.signal()
	s.wr.signal()
}

// violation ends the connection because the peer broke the protocol.
func (s *Session) violation(format string, args ...any) {
	s.fail(fmt.Errorf("session: the peer broke the protocol: %s: %w", fmt.Sprintf(format, args...), syscall.ECONNRESET))
}

// over says why the connection is over for Write: the session's own reason, else
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
