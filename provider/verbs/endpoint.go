package verbs

import (
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sanconn/san/session"
)

// Endpoint is a reliable-connected queue pair with its completion queue and its
// buffers. It implements session.Endpoint.
//
// Whoever polls reaps completions in batches: the session's reader in Poll, or its writer in Reserve.
// Received messages and completions of remote access wait until Poll returns them.
//
// When the peer closes in order, it sends an empty message after all others (no session message is
// empty), which is reported as EPIPE. Any other end of the connection, such as an event of rdma_cm or a
// failed work request, is reported as ECONNRESET or ETIMEDOUT, after the completion queue has been
// emptied.
type Endpoint struct {
	resources
	tcp     net.Conn       // the connection over which it was set up without rdma_cm; or nil
	watch   sync.WaitGroup // waits for the end of tcp
	limits  session.Limits
	passive bool
	closing sync.Once
	retired atomic.Bool
}

var _ session.Endpoint = (*Endpoint)(nil)

// spin is how long polling pays: a round trip between hosts takes 2 to 10 µs, and a wake-up by the
// completion channel 5 to 20 µs.
const spin = 50 * time.Microsecond

// Limits implements session.Endpoint.
func (e *Endpoint) Limits() session.Limits { return e.limits }

// Memory implements session.Endpoint.
func (e *Endpoint) Memory() session.Memory { return &e.mem }

// Err implements session.Endpoint.
func (e *Endpoint) Err() error { return e.q.reported() }

// Describe implements session.Describer.
func (e *Endpoint) Describe() string {
	q := &e.q
	if !session.LockSoon(&q.mu) {
		return "of device " + e.dev.ctx.Name + ", busy: its lock is held"
	}
	defer q.mu.Unlock()
	number, state := uint32(0), "ready"
	if q.qp != nil {
		number = q.qp.Num
	}
	switch {
	case q.closed:
		state = "ended"
	case q.cause != nil:
		state = fmt.Sprintf("in error: %v", q.cause)
	}
	return fmt.Sprintf("queue pair %d of %s, %s; sends under way: %d, RDMA reads %d, writes %d; arrived and not taken: %d messages",
		number, e.dev.ctx.Name, state, e.send.underwayLocked(), e.mem.reads.n, e.mem.writes.n, e.recv.arrived.n)
}

// Start implements session.Waiting.
func (e *Endpoint) Start(w session.Waker) {
	e.q.waker.Store(&w)
	if e.Err() != nil {
		e.q.wake(session.RecvReady | session.SendReady)
	}
}

// Arm implements session.Waiting: the next completion of any kind wakes.
func (e *Endpoint) Arm(ev session.Events) {
	e.q.armed.Or(uint32(ev))
	e.q.notify()
}

// Disarm implements session.Waiting.
func (e *Endpoint) Disarm(ev session.Events) { e.q.armed.And(^uint32(ev)) }

// Reserve implements session.Messages.
func (e *Endpoint) Reserve(lo, hi int) []byte {
	return e.reserve(func() []byte { return e.send.reserveLocked(lo, hi) })
}

// ReserveControl implements session.Messages.
func (e *Endpoint) ReserveControl(n int) []byte {
	return e.reserve(func() []byte { return e.send.reserveControlLocked(n) })
}

// reserve returns the room that find finds, unless nothing can be sent any more. If there is no room,
// it reaps completions, which may make some.
func (e *Endpoint) reserve(find func() []byte) (room []byte) {
	e.q.mu.Lock()
	if !e.q.overLocked() {
		room = find()
	}
	if room == nil {
		if e.q.drainLocked(); !e.q.overLocked() {
			room = find()
		}
	}
	e.q.mu.Unlock()
	return room
}

// Commit implements session.Messages.
func (e *Endpoint) Commit(n int) { e.send.commit(&e.send.data, n, 0) }

// CommitControl implements session.Messages.
func (e *Endpoint) CommitControl(n int) { e.send.commit(&e.send.control, n, 0) }

// Poll implements session.Messages.
func (e *Endpoint) Poll(ev *session.Event) bool {
	e.q.mu.Lock()
	e.recv.finishLastLocked()
	if e.mem.done.n == 0 && e.recv.arrived.n == 0 {
		e.q.drainLocked()
	}
	switch {
	case e.mem.done.n > 0:
		d := e.mem.done.pop()
		e.q.mu.Unlock()
		d.region.Release() // before the completion is reported (rule E2)
		*ev = session.Event{Kind: d.kind, ID: d.id, Err: d.err}
		return true
	case e.recv.arrived.n > 0:
		e.recv.nextLocked(ev)
		e.q.mu.Unlock()
		return true
	}
	e.recv.postSomeLocked()
	e.q.mu.Unlock()
	return false
}

// Drop implements session.Messages. The next Poll or a later one posts the buffer, because now the
// program waits for what the message brought.
func (e *Endpoint) Drop() { e.recv.dropped = true }

// Keep implements session.Messages.
func (e *Endpoint) Keep() {
	e.q.mu.Lock()
	e.recv.kept.push(e.recv.last)
	e.recv.last = arrival{}
	e.q.mu.Unlock()
}

// Front implements session.Messages.
func (e *Endpoint) Front() (m []byte) {
	e.q.mu.Lock()
	if e.recv.kept.n > 0 {
		m = e.recv.message(*e.recv.kept.at(0))
	}
	e.q.mu.Unlock()
	return m
}

// Release implements session.Messages.
func (e *Endpoint) Release() {
	e.q.mu.Lock()
	e.recv.againLocked(e.recv.kept.pop())
	e.q.mu.Unlock()
}
