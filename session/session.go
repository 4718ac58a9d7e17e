// Package session is the session protocol: it gives a reliable byte stream
// with TCP's semantics over an Endpoint, which moves messages and reaches
// remote memory. It knows no device and no net.Conn. sanconn calls it from
// above, the providers implement its Endpoint below.
//
// A byte's way: Write (send.go) puts it into a message, or offers the slice it
// lies in (rendezvous.go), or copies it to the peer's inbox (outbox.go, inbox.go); the
// peer's poll (receive.go) keeps the message, and Read copies from it, or has
// the offered bytes fetched (fetch.go). The beginning is in negotiate.go, flow control
// in credit.go, waiting in wait.go, what happens when nobody is inside in idle.go, the
// end in close.go, the wire format in wire.go and docs/PROTOCOL.md.
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

// Session is one end of a connection. All methods may be called from any
// goroutine; Reads are served one at a time, and so are Writes.
//
// Locks, in this order: rd.op, wr.op (held for a whole operation), rx.mu,
// tx.mu (held for moments: at most a copy of boxMost, or the provider's
// Revoke; nothing waits under them, but for memory to be registered when
// RLIMIT_MEMLOCK is used up: docs/ARCHITECTURE.md).
type Session struct {
	ep   Endpoint
	lim  Limits
	cfg  Config
	pace pollPace
	caps uint32 // what we said that we can
	peer params // what the peer said; written by Negotiate before any Read or Write

	rd, wr side
	rx     receiver
	tx     sender

	credits creditCounts

	failure  atomic.Pointer[error] // why the connection is over, set once
	gone     bool                  // the endpoint is closed, or being closed; written under rx.mu and tx.mu, read under either
	giveBack sync.Once             // closes or aborts the endpoint; who comes second waits for it

	idle    idleState
	alive   keepalive
	closing closing
	workers sync.WaitGroup // background service
}

// side is one direction's operation.
type side struct {
	op    opLock        // held by the operation as long as it lasts
	state atomic.Uint32 // st bits: why it has to end
	wants atomic.Uint32 // Events to be woken for; 0: does not sleep
	wake  chan struct{} // holds one token: look again
	spin  spinHistory   // guarded by op

	beside atomic.Bool // on a device: a Write came while a Read was inside (rd)

	sleeps, polls atomic.Uint64
}

const (
	stInterrupted = 1 << iota // by InterruptRead, InterruptWrite
	stShut                    // this direction was closed here
	stClosed                  // the session was closed here
	stPeerClosed              // the peer does not read any more (wr)
)

// opLock is a mutex for operations that last: who waits for it sleeps on a
// channel, in the order of coming. (One who waits for a sync.Mutex keeps
// testing/synctest's time from passing, and the holder may be waiting for just
// that.)
type opLock struct {
	users atomic.Int32
	next  chan struct{} // a token for the next of them
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

// tryLock is Lock, if nobody is inside.
func (l *opLock) tryLock() bool { return l.users.CompareAndSwap(0, 1) }

// held: an operation is inside.
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
	// ErrInterrupted: InterruptRead or InterruptWrite ended the wait.
	ErrInterrupted = errors.New("session: interrupted")
	// ErrClosed: this end was closed (or this direction of it, for Write).
	ErrClosed = errors.New("session: closed")
	// ErrNoUrgent: no urgent data has arrived that was not read yet.
	ErrNoUrgent = errors.New("session: no urgent data")
)

// New starts a session on ep, which it owns from now on, and sends the
// negotiation message. It does not block. Negotiate must have succeeded before
// any Read or Write.
func New(ep Endpoint, cfg Config) *Session {
	s := &Session{ep: ep, lim: ep.Limits(), cfg: cfg.withDefaults(), pace: measurePace()}
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
	if !s.lim.Buffered {
		s.pace.forDevice(s.lim.Worker)
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

// InterruptRead makes a Read that waits, and later ones, fail with
// ErrInterrupted until it is called with false.
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

// Limits of the endpoint.
func (s *Session) Limits() Limits { return s.lim }

// fail records why the connection is over and wakes everybody. What had
// arrived and was not read is lost, but for a stream that has ended already.
// It may be called with any lock held.
func (s *Session) fail(err error) {
	if s.failure.CompareAndSwap(nil, &err) {
		s.rd.signal()
		s.wr.signal()
	}
}

// kill is fail, and the endpoint is aborted before it returns: no memory of
// this end is touched by the peer any more. No lock may be held.
func (s *Session) kill(err error) {
	s.fail(err)
	s.detach(s.ep.Abort)
	s.rd.signal()
	s.wr.signal()
}

// violation is how a peer that breaks the protocol ends the connection.
func (s *Session) violation(format string, args ...any) {
	s.fail(fmt.Errorf("session: the peer broke the protocol: %s: %w", fmt.Sprintf(format, args...), syscall.ECONNRESET))
}

// over is why the connection is over for Write: the session's own reason, or
// the endpoint's.
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
