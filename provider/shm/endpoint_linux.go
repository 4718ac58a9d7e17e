package shm

import (
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sanconn/san/provider/shm/internal/ring"
	"github.com/sanconn/san/session"
)

// spinFor is how long to poll before sleeping: a few round trips, which cost less than waking an idle
// processor.
const spinFor = 50 * time.Microsecond

// endpoint is one end of a connection. session.Endpoint documents which methods may be called
// concurrently.
type endpoint struct {
	session.Sleeper // the link's waiters

	link   *link
	slot   *slot
	local  *sideState // the states of this side and of the peer, in shared memory
	remote *sideState
	turn   uint32 // the connection's number among those of the slot

	waker atomic.Pointer[session.Waker]
	err   atomic.Pointer[error]
	bad   atomic.Bool // the peer broke the rules, or the link has failed here: no more messages are taken from the ring

	closing  sync.Once
	retiring sync.Once
	closed   atomic.Bool
	inside   atomic.Int32 // calls of Arm, Disarm and Withdraw, which may overlap Close

	_   [128]byte // out and in are used on different processors
	out ring.Writer
	_   [128]byte
	in  ring.Reader
	met bool // the peer has begun the connection: its half of the slot is about this one
	_   [128]byte
}

var (
	_ session.Endpoint   = (*endpoint)(nil)
	_ session.Withdrawer = (*endpoint)(nil)
	_ session.Starver    = (*endpoint)(nil)
)

// newEndpoint makes the endpoint of a slot's next connection. The peer has no endpoint on the slot yet,
// or, at the accepting end, has one that may have sent already.
func newEndpoint(l *link, s *slot, turn uint32) *endpoint {
	e := &endpoint{Sleeper: &l.waiters, link: l, slot: s, local: &s.own.control.state, remote: &s.peers.control.state, turn: turn}
	pages := s.pages.get()
	if pages > ring.Start && l.slots.memory.Exceeded() && l.mayPunch && punchHole(s.own.ring, pages, l.slots.memory) {
		pages = 0
	}
	s.turn.Store(turn)
	s.own.control.out.Reset()
	s.own.control.in.Reset()
	e.out.Init(&s.own.control.out, s.own.cells, s.own.ring, &s.peers.control.in, l.cfg.ringMax, pages, l.slots.memory)
	e.in.Init(&s.peers.control.out, s.peers.cells, s.peers.ring, &s.own.control.in)
	if e.met = s.accepted(); !e.met {
		e.out.Alone()
	}
	return e
}

// begin shows the peer that the connection has begun here. The endpoint must be attached.
func (e *endpoint) begin() {
	e.local.v.Store(e.turn | stateOpen)
	if e.bad.Load() { // linkDied was called before
		e.abandon()
	}
}

// abandon aborts a connection that has begun here and that the session has not ended.
func (e *endpoint) abandon() {
	for _, alive := range [2]uint32{stateOpen, stateWithdrawn | stateHeld} {
		e.local.v.CompareAndSwap(e.turn|alive, e.turn|stateAborted|stateHeld)
	}
}

// discard ends an endpoint that was never attached.
func (e *endpoint) discard() {
	e.slot.pages.put(e.out.Pages())
	e.link.reclaim.schedule() // a sweep in between may have found the slot without pages
}

// Limits implements session.Endpoint.
func (e *endpoint) Limits() session.Limits {
	return session.Limits{Provider: Name, MaxMessage: ring.MaxMessage, Spin: spinFor}
}

// Memory implements session.Endpoint: all bytes go through the ring.
func (e *endpoint) Memory() session.Memory { return nil }

// Start implements session.Endpoint.
func (e *endpoint) Start(w session.Waker) {
	e.waker.Store(&w)
	if e.err.Load() != nil || e.remote.load(e.turn) != stateOpen {
		w.Wake(session.RecvReady | session.SendReady)
	}
}

func (e *endpoint) wake(ev session.Events) {
	if w := e.waker.Load(); w != nil && !e.closed.Load() {
		(*w).Wake(ev)
	}
}

// Arm implements session.Endpoint. No wake-up is lost, because its stores are sequentially consistent:
// the peer publishes and then reads them; the session arms and then looks at what is published.
func (e *endpoint) Arm(ev session.Events) {
	if !e.enter() {
		return
	}
	if ev&session.RecvReady != 0 {
		e.in.Arm()
	}
	if ev&session.SendReady != 0 {
		e.out.Arm()
	}
	e.inside.Add(-1)
}

// Disarm implements session.Endpoint.
func (e *endpoint) Disarm(ev session.Events) {
	if !e.enter() {
		return
	}
	if ev&session.RecvReady != 0 {
		e.in.Disarm()
	}
	if ev&session.SendReady != 0 {
		e.out.Disarm()
	}
	e.inside.Add(-1)
}

// enter keeps Close from finishing, and so the slot in use and mapped, until the caller decrements
// inside. It returns false if the endpoint is closed.
func (e *endpoint) enter() bool {
	e.inside.Add(1)
	if e.closed.Load() {
		e.inside.Add(-1)
		return false
	}
	return true
}

// Describe implements session.Describer.
func (e *endpoint) Describe() string {
	own, peers := e.slot.own.control, e.slot.peers.control
	return fmt.Sprintf("slot %d of the link with process %d; bytes in the rings: %d to the peer, %d from it; the peer sleeps: %v, waits for room: %v",
		e.slot.number, e.link.peer.pid, own.out.Backlog(&peers.in), peers.out.Backlog(&own.in), e.out.ReaderSleeps(), e.in.WriterWaits())
}

// Err implements session.Endpoint. Once it has found that the peer has ended the connection, the result
// is final, whatever the peer writes later.
func (e *endpoint) Err() error {
	if state := e.remote.load(e.turn); state != stateOpen {
		e.overByPeer(state)
	}
	if err := e.err.Load(); err != nil {
		return *err
	}
	return nil
}

// fail ends the connection at this end and wakes the session. The first error stays.
func (e *endpoint) fail(err error) {
	if e.err.CompareAndSwap(nil, &err) {
		e.wake(session.RecvReady | session.SendReady)
	}
}

// violation ends a connection whose peer broke the rules.
func (e *endpoint) violation(how error) {
	e.bad.Store(true)
	e.fail(fmt.Errorf("shm: the peer broke the protocol: %v; %w: %w", how, session.ErrLost, syscall.ECONNRESET))
}

// overByPeer ends the connection with the error for the peer's state. The caller is awake; other
// operations of the session are woken if one may sleep.
func (e *endpoint) overByPeer(state uint32) {
	err := &errPeerAborted
	if state == stateClosed {
		err = &errPeerClosed
	}
	if e.err.CompareAndSwap(nil, err) && (e.in.Armed() || e.out.Armed()) {
		e.wake(session.RecvReady | session.SendReady)
	}
}

// linkDied ends a connection whose link has died, with the peer's end of it if the peer had ended it
// before.
func (e *endpoint) linkDied(cause error) {
	state := e.remote.load(e.turn)
	if cause != errPeerGone {
		// A peer that lives must not take this for the end of this process, nor take the connection after it
		// was found not taken here, nor give back memory that is still read here.
		if state == stateOpen {
			e.bad.Store(true)
		}
		e.abandon()
	}
	if state != stateOpen {
		e.overByPeer(state)
		return
	}
	switch {
	case !e.slot.accepted():
		cause = linkGone(cause)
	case cause != errPeerGone: // see bad
		cause = fmt.Errorf("%w; %w", cause, session.ErrLost)
	case cause == errPeerGone && e.slot.own.control.out.Unread(&e.slot.peers.control.in):
		cause = errPeerUnread
	}
	e.fail(cause)
}

// Close implements session.Endpoint. It waits at most for the reclaimer to give back
// the ring's pages, which takes less than a millisecond.
func (e *endpoint) Close() error {
	e.close(stateClosed)
	return nil
}

// Abort implements session.Endpoint; the wait is as in Close.
func (e *endpoint) Abort() { e.close(stateAborted) }

func (e *endpoint) close(state uint32) {
	e.closing.Do(func() {
		if e.bad.Load() {
			state = stateAborted
		}
		e.closed.Store(true)
		for e.inside.Load() != 0 {
			runtime.Gosched()
		}
		e.out.Stop()
		e.fail(errClosed)
		e.local.v.Store(e.turn | state | stateHeld)
		var armed session.Events // by the peer, which then looks for the state, as in Arm
		if e.out.ReaderSleeps() {
			armed |= session.RecvReady
		}
		if e.in.WriterWaits() {
			armed |= session.SendReady
		}
		if armed != 0 {
			e.link.door.ring(e.slot.number, armed)
		}
	})
}

// Withdraw implements session.Withdrawer.
func (e *endpoint) Withdraw() bool {
	if !e.enter() {
		return false
	}
	defer e.inside.Add(-1)
	if e.slot.accepted() {
		return false
	}
	e.local.v.Store(e.turn | stateWithdrawn | stateHeld)
	return !e.slot.accepted()
}

// Retire implements session.Endpoint. Until then the slot keeps its memory, also when the
// link has died, and no connection follows on it.
func (e *endpoint) Retire() {
	e.retiring.Do(func() {
		e.slot.pages.put(e.out.Pages())
		e.slot.ep.CompareAndSwap(e, nil)
		e.local.v.And(^uint32(stateHeld)) // last: the slot may now be reused
		e.link.detach(e.slot)
	})
}
