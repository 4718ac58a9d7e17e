package twin

import (
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sanconn/san/session"
)

// Endpoint is one end of a Pair. It implements session.Endpoint; the other
// methods are for the test that made the pair, and any goroutine may call them
// at any time.
type Endpoint struct {
	w      *wire
	id     int
	limits session.Limits

	// Unguarded on purpose: the contract leaves it to the session that one
	// goroutine at a time is in a group, and the race detector sees it here
	// when that does not hold.
	sending, receiving int

	gone atomic.Bool // Close or Abort has returned

	mem memory

	// All below: w.mu.

	dice    dice
	waker   session.Waker
	armed   session.Events
	wakes   session.Events // to be told at the end of this run
	calls   int
	err     error
	closed  bool
	aborted bool
	dead    bool
	retired bool
	held    Hold
	parked  []event // held back by Hold

	data       room          // what Reserve gave
	control    room          // what ReserveControl gave
	inSend     int           // messages in the send queue (with a Window)
	ringUsed   int           // bytes of the ring towards the peer
	untaken    int           // data messages that the peer has neither dropped nor released
	seemsFull  bool          // an event will say that the queue is not full, as it never was
	lastArrive time.Duration // time of the last arrival scheduled at the peer

	posted int // receive buffers (with a Window)
	inbox  fifo[*message]
	last   *message // of the last Poll, to be dropped or kept
	kept   fifo[*message]
	ring   fifo[*message] // what occupies the peer's ring towards here, in order

	ops       fifo[*operation] // posted, in order
	spareOps  []*operation
	opsOpen   int // posted, completion not polled
	lastDone  [2]time.Duration
	completed [2]fifo[*operation] // by kind, not polled yet
}

var _ session.Endpoint = (*Endpoint)(nil)

func newEndpoint(w *wire, id int, l session.Limits) *Endpoint {
	if l.Provider == "" {
		l.Provider = "twin"
	}
	orInt(&l.MaxMessage, defaultMessage)
	if l.CanRead || l.CanWrite {
		orInt(&l.MaxRDMA, defaultRDMA)
	}
	if l.MaxMessage < session.MaxControl || l.Window != 0 && l.Window < session.MinWindow {
		panic(fmt.Sprintf("twin: limits below the contract's: %+v", l))
	}
	if l.Ring() && l != (session.Limits{Provider: l.Provider, MaxMessage: l.MaxMessage, Spin: l.Spin}) {
		panic(fmt.Sprintf("twin: a ring with remote memory: %+v", l))
	}
	e := &Endpoint{w: w, id: id, limits: l, dice: newDice(w.cfg.Seed, id), posted: l.Window}
	e.mem.init(e)
	return e
}

func (e *Endpoint) peer() *Endpoint { return e.w.ends[1-e.id] }

// ended: nothing can happen here any more that the session would see.
func (e *Endpoint) ended() bool { return e.closed || e.aborted || e.dead }

// enter takes the lock at the start of every call into the end, and lets its
// process die if this is the call at which it does. The method is one that is
// not called after Close.
func (e *Endpoint) enter(name string) {
	gone := e.gone.Load() // before the lock: a call that met Close is no misuse
	e.enterLate(name)
	if gone && !e.retired {
		e.w.violate(Misuse, e.id, "%s after Close or Abort", name)
	}
}

// enterLate is enter for a method that may be called after Close.
func (e *Endpoint) enterLate(name string) {
	e.lock()
	e.notRetired(name)
	e.calls++
	if e.calls == e.w.cfg.Faults.DieAt[e.id] {
		e.die()
	}
}

// notRetired reports a call after Retire. w.mu is held.
func (e *Endpoint) notRetired(name string) {
	if e.retired {
		e.w.violate(Misuse, e.id, "%s after Retire", name)
	}
}

// lock takes the wire's lock, and may linger before.
func (e *Endpoint) lock() {
	e.w.mu.Lock()
	f := &e.w.cfg.Faults
	if !e.dice.chance(diceLinger, f.Linger) {
		return
	}
	r := e.dice[diceLinger]
	d := time.Duration(r.Float64() * lingerMost * float64(e.w.cfg.MaxLatency))
	least := time.Duration(r.Float64() * float64(f.LingerFor))
	e.w.mu.Unlock()
	e.w.linger(d, least)
	e.w.mu.Lock()
}

func (e *Endpoint) leave() { e.w.mu.Unlock() }

func (e *Endpoint) Limits() session.Limits { return e.limits }

// Memory returns nil where the limits have nothing of it.
func (e *Endpoint) Memory() session.Memory {
	if l := &e.limits; l.CanRead || l.CanWrite || l.MaxExpose > 0 {
		return &e.mem
	}
	return nil
}

func (e *Endpoint) Start(wk session.Waker) {
	e.enter("Start")
	defer e.leave()
	if e.waker != nil || wk == nil {
		e.w.violate(Misuse, e.id, "Start twice, or without a Waker")
	}
	e.waker = wk
	if e.err != nil {
		e.wakes |= session.RecvReady | session.SendReady
	}
	if e.wakes != 0 {
		e.w.at(e.w.now(), event{end: e, kind: stray})
	}
}

// wake has the waker told of bits from the timer's goroutine.
func (e *Endpoint) wake(bits session.Events) {
	if e.wakes == 0 {
		e.w.at(e.w.now(), event{end: e, kind: stray})
	}
	e.wakes |= bits
	e.armed &^= bits
}

// ready says that something of bits may have happened: whoever armed for it is
// woken, nobody else.
func (e *Endpoint) ready(bits session.Events) {
	if bits &= e.armed; bits != 0 {
		e.wake(bits)
	}
}

// Arm may come after Close, as may Disarm.
func (e *Endpoint) Arm(bits session.Events) {
	e.w.mu.Lock()
	defer e.w.mu.Unlock()
	e.notRetired("Arm")
	if e.closed || e.aborted {
		return
	}
	if e.waker == nil {
		e.w.violate(Misuse, e.id, "Arm before Start")
		return
	}
	e.armed |= bits
	if e.dice.chance(diceStray, e.w.cfg.Faults.Stray) {
		e.wake(bits)
	}
}

func (e *Endpoint) Disarm(bits session.Events) {
	e.w.mu.Lock()
	defer e.w.mu.Unlock()
	e.notRetired("Disarm")
	e.armed &^= bits
}

// happen is what an event does. The lock is held.
func (e *Endpoint) happen(ev event) {
	if e.parks(ev) {
		return
	}
	switch ev.kind {
	case arrive:
		e.arrived(ev.msg)
	case sent:
		e.inSend--
		e.ready(session.SendReady)
	case notBusy:
		e.seemsFull = false
		e.ready(session.SendReady)
	case hasRoom:
		e.ready(session.SendReady)
	case piece, done:
		e.progress(ev)
	case fin:
		if !e.w.cut || ev.err == errKilled {
			e.fail(ev.err)
		}
	case stray: // e.wakes has the bits
	}
	if ev.kind != stray && e.dice.chance(diceStray, e.w.cfg.Faults.Stray) {
		e.wakes |= session.RecvReady | session.SendReady
	}
}

// fail ends the connection as this end sees it. What is posted completes with
// the error, what has arrived stays.
func (e *Endpoint) fail(err error) {
	if e.err != nil || e.ended() {
		return
	}
	e.err = err
	for e.ops.len() > 0 {
		op := e.ops.pop()
		op.err = err
		e.complete(op)
	}
	e.wake(session.RecvReady | session.SendReady)
}

var (
	errClosed  = fmt.Errorf("twin: closed: %w", syscall.EPIPE)
	errKilled  = fmt.Errorf("twin: this process has ended: %w", syscall.ECONNRESET)
	errVanish  = fmt.Errorf("twin: the peer vanished: %w", syscall.ECONNRESET)
	errUnread  = fmt.Errorf("twin: the peer's process ended with unread messages: %w", syscall.ECONNRESET)
	errPeerEnd = fmt.Errorf("twin: the peer's process ended: %w", io.EOF)
	errAborted = fmt.Errorf("twin: aborted: %w", syscall.ECONNRESET)
	errLocal   = errors.New("twin: ended at this end")
)

func (e *Endpoint) Err() error {
	e.lock()
	defer e.w.mu.Unlock()
	e.notRetired("Err")
	if e.err == nil && e.ended() {
		return errLocal
	}
	return e.err
}

func (e *Endpoint) Close() error {
	e.end(false)
	return nil
}

func (e *Endpoint) Abort() { e.end(true) }

func (e *Endpoint) end(abort bool) {
	e.w.mu.Lock()
	defer e.w.mu.Unlock()
	defer e.gone.Store(true)
	e.notRetired("Close or Abort")
	if e.closed || e.aborted {
		return
	}
	e.closed, e.aborted = !abort, abort
	e.stop()
	if e.dead || e.w.cut {
		return
	}
	p, now := e.peer(), e.w.now()
	switch {
	case abort:
		e.w.at(now+e.w.latency(&e.dice, diceEnd), event{end: p, kind: fin, err: errAborted})
	case e.err != nil: // the peer knows already
	default:
		e.w.at(e.arrival(), event{end: p, kind: fin, err: errClosed})
	}
}

// stop ends what is under way. What was received and is neither kept nor reserved
// is overwritten.
func (e *Endpoint) stop() {
	e.mem.left = e.audit()
	for e.ops.len() > 0 {
		e.ops.pop().over = true
	}
	e.mem.exposed = nil
	if e.last != nil {
		fill(e.last.buf, noiseFreed)
		e.last = nil
	}
	for e.inbox.len() > 0 {
		fill(e.inbox.pop().buf, noiseFreed)
	}
}

// Retire overwrites what was reserved or kept, so that nobody can go on using it
// unnoticed.
func (e *Endpoint) Retire() {
	e.w.mu.Lock()
	defer e.w.mu.Unlock()
	if !e.closed && !e.aborted || e.retired {
		e.w.violate(Misuse, e.id, "Retire twice, or before Close and Abort")
		return
	}
	e.retired = true
	for e.kept.len() > 0 {
		fill(e.kept.pop().buf, noiseFreed)
	}
	for _, r := range []*room{&e.data, &e.control} {
		if r.m != nil {
			fill(r.m.buf, noiseFreed)
			*r = room{}
		}
	}
}
