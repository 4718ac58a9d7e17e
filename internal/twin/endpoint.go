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

// Endpoint is one end of a Pair. It implements session.Endpoint. The other methods are for the test
// that has made the pair; any goroutine may call them at any time.
type Endpoint struct {
	w      *wire
	id     int
	limits session.Limits

	// Unguarded on purpose: by the contract the session ensures that one goroutine at a time is in a
	// group of methods, and the race detector reports here if that is not so.
	sending, receiving int

	gone atomic.Bool // Close or Abort has returned

	// The fields below are guarded by w.mu.

	mem memory

	dice    dice
	waker   session.Waker
	armed   session.Events
	wakes   session.Events // for the waker, at the end of this run
	calls   int
	err     error
	closed  bool
	aborted bool
	dead    bool
	retired bool
	held    Hold
	parked  []event // held back by Hold

	tx sender
	rx receiver
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
	e := &Endpoint{w: w, id: id, limits: l, dice: newDice(w.cfg.Seed, id)}
	e.mem.init(e)
	e.tx.e, e.rx.e = e, e
	e.rx.posted = l.Window
	return e
}

func (e *Endpoint) peer() *Endpoint { return e.w.ends[1-e.id] }

// endedLocked reports whether nothing can happen here any more that the session would see.
func (e *Endpoint) endedLocked() bool { return e.closed || e.aborted || e.dead }

// enter takes the lock at the start of a call into the end. The process dies if this is the call at
// which it does. The method must be one that is not called after Close.
func (e *Endpoint) enter(name string) {
	gone := e.gone.Load() // read before the lock is taken: a call that overlaps Close is no misuse
	e.enterLate(name)
	if gone && !e.retired {
		e.w.violateLocked(Misuse, e.id, "%s after Close or Abort", name)
	}
}

// enterLate is enter for a method that may be called after Close.
func (e *Endpoint) enterLate(name string) {
	e.lock()
	e.notRetiredLocked(name)
	e.calls++
	if e.calls == e.w.cfg.Faults.DieAt[e.id] {
		e.dieLocked()
	}
}

// notRetiredLocked reports a call after Retire.
func (e *Endpoint) notRetiredLocked(name string) {
	if e.retired {
		e.w.violateLocked(Misuse, e.id, "%s after Retire", name)
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

// Memory returns nil if the limits have no remote memory.
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
		e.w.violateLocked(Misuse, e.id, "Start twice, or without a Waker")
	}
	e.waker = wk
	if e.err != nil {
		e.wakes |= session.RecvReady | session.SendReady
	}
	if e.wakes != 0 {
		e.w.scheduleLocked(e.w.nowLocked(), event{end: e, kind: stray})
	}
}

// wakeLocked wakes for bits, from the timer's goroutine.
func (e *Endpoint) wakeLocked(bits session.Events) {
	if e.wakes == 0 {
		e.w.scheduleLocked(e.w.nowLocked(), event{end: e, kind: stray})
	}
	e.wakes |= bits
	e.armed &^= bits
}

// readyLocked notes that bits may have happened: it wakes only an end that is armed for them.
func (e *Endpoint) readyLocked(bits session.Events) {
	if bits &= e.armed; bits != 0 {
		e.wakeLocked(bits)
	}
}

// Arm may be called after Close, like Disarm.
func (e *Endpoint) Arm(bits session.Events) {
	e.w.mu.Lock()
	defer e.w.mu.Unlock()
	e.notRetiredLocked("Arm")
	if e.closed || e.aborted {
		return
	}
	if e.waker == nil {
		e.w.violateLocked(Misuse, e.id, "Arm before Start")
		return
	}
	e.armed |= bits
	if e.dice.chance(diceStray, e.w.cfg.Faults.Stray) {
		e.wakeLocked(bits)
	}
}

func (e *Endpoint) Disarm(bits session.Events) {
	e.w.mu.Lock()
	defer e.w.mu.Unlock()
	e.notRetiredLocked("Disarm")
	e.armed &^= bits
}

// happenLocked performs an event.
func (e *Endpoint) happenLocked(ev event) {
	if e.parksLocked(ev) {
		return
	}
	switch ev.kind {
	case arrive:
		e.rx.arrivedLocked(ev.msg)
	case sent:
		e.tx.inSend--
		e.readyLocked(session.SendReady)
	case notBusy:
		e.tx.seemsFull = false
		e.readyLocked(session.SendReady)
	case hasRoom:
		e.readyLocked(session.SendReady)
	case piece, done:
		e.mem.progressLocked(ev)
	case fin:
		if !e.w.cut || ev.err == errKilled {
			e.failLocked(ev.err)
		}
	case stray: // e.wakes has the bits
	}
	if ev.kind != stray && e.dice.chance(diceStray, e.w.cfg.Faults.Stray) {
		e.wakes |= session.RecvReady | session.SendReady
	}
}

// failLocked ends the connection at this end. Posted operations complete with the error; messages that
// have arrived stay.
func (e *Endpoint) failLocked(err error) {
	if e.err != nil || e.endedLocked() {
		return
	}
	e.err = err
	for e.mem.ops.len() > 0 {
		op := e.mem.ops.pop()
		op.err = err
		e.mem.completeLocked(op)
	}
	e.wakeLocked(session.RecvReady | session.SendReady)
}

var (
	errClosed  = fmt.Errorf("twin: closed: %w", syscall.EPIPE)
	errKilled  = fmt.Errorf("twin: ended here, with its process or its link; %w: %w", session.ErrLost, syscall.ECONNRESET)
	errVanish  = fmt.Errorf("twin: the peer vanished: %w", syscall.ECONNRESET)
	errUnread  = fmt.Errorf("twin: the peer's process ended with unread messages: %w", syscall.ECONNRESET)
	errPeerEnd = fmt.Errorf("twin: the peer's process ended: %w", io.EOF)
	errAborted = fmt.Errorf("twin: aborted: %w", syscall.ECONNRESET)
	errLocal   = errors.New("twin: ended at this end")
)

func (e *Endpoint) Err() error {
	e.lock()
	defer e.w.mu.Unlock()
	e.notRetiredLocked("Err")
	if e.err == nil && e.endedLocked() {
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
	e.notRetiredLocked("Close or Abort")
	if e.closed || e.aborted {
		return
	}
	e.closed, e.aborted = !abort, abort
	e.stopLocked()
	if e.dead || e.w.cut {
		return
	}
	p, now := e.peer(), e.w.nowLocked()
	switch {
	case abort:
		e.w.scheduleLocked(now+e.w.latency(&e.dice, diceEnd), event{end: p, kind: fin, err: errAborted})
	case e.err != nil: // the peer has it already
	default:
		e.w.scheduleLocked(e.tx.arrivalLocked(), event{end: p, kind: fin, err: errClosed})
	}
}

// stopLocked ends operations in progress. Received messages that are neither kept nor reserved are
// overwritten.
func (e *Endpoint) stopLocked() {
	e.mem.left = e.auditLocked()
	e.mem.stopLocked(func(op *operation) { op.over = true })
	e.mem.exposed = nil
	if e.rx.last != nil {
		fill(e.rx.last.buf, noiseFreed)
		e.rx.last = nil
	}
	for e.rx.inbox.len() > 0 {
		fill(e.rx.inbox.pop().buf, noiseFreed)
	}
}

// Retire overwrites what was reserved or kept, so that a later use is noticed.
func (e *Endpoint) Retire() {
	e.w.mu.Lock()
	defer e.w.mu.Unlock()
	if !e.closed && !e.aborted || e.retired {
		e.w.violateLocked(Misuse, e.id, "Retire twice, or before Close and Abort")
		return
	}
	e.retired = true
	for e.rx.kept.len() > 0 {
		fill(e.rx.kept.pop().buf, noiseFreed)
	}
	for _, r := range []*room{&e.tx.data, &e.tx.control} {
		if r.m != nil {
			fill(r.m.buf, noiseFreed)
			*r = room{}
		}
	}
}
