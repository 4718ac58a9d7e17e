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
	held    Hold
	parked  []event // held back by Hold

	reserved   *message      // what Reserve gave
	room       int           // bytes of it
	inSend     int           // messages in the send queue (with a Window)
	ringUsed   int           // bytes of the ring towards the peer
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

	memory
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
	e := &Endpoint{w: w, id: id, limits: l, dice: newDice(w.cfg.Seed, id), posted: l.Window}
	e.memory.init()
	return e
}

func (e *Endpoint) peer() *Endpoint { return e.w.ends[1-e.id] }

// ended: nothing can happen here any more that the session would see.
func (e *Endpoint) ended() bool { return e.closed || e.aborted || e.dead }

// enter takes the lock at the start of every call into the end, and lets its
// process die if this is the call at which it does. name: of a method that is
// not called after Close.
func (e *Endpoint) enter(name string) {
	gone := e.gone.Load() // before the lock: a call that met Close is no misuse
	e.lock()
	if gone && name != "" {
		e.w.violate(Misuse, e.id, "%s after Close or Abort", name)
	}
	e.calls++
	if e.calls == e.w.cfg.Faults.DieAt[e.id] {
		e.die()
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
	e.armed &^= bits
}

// controlCost is the largest control message's share of the ring.
const controlCost = session.MaxControl + ringHeader

// ringHeader is what a message occupies in the ring beside its bytes.
const ringHeader = 8

// space is the size in bytes of the largest message that can be sent now, 0 if
// none can.
func (e *Endpoint) space(control bool) int {
	if e.peer().limits.Window > 0 {
		free := e.w.cfg.SendQueue - e.inSend
		if !control {
			free -= session.ControlReserve
		}
		if free <= 0 {
			return 0
		}
		return e.limits.MaxMessage
	}
	free := e.w.cfg.QueueBytes - e.ringUsed - ringHeader
	if !control {
		free -= session.ControlReserve * controlCost
	}
	return min(free, e.limits.MaxMessage)
}

func (e *Endpoint) Reserve(lo, hi int, control bool) []byte {
	e.sending++
	e.enter("Reserve")
	defer e.leave()
	if lo < 1 || lo > hi || hi > e.limits.MaxMessage || control && lo > session.MaxControl {
		e.w.violate(Misuse, e.id, "Reserve(%d, %d, %v)", lo, hi, control)
		return nil
	}
	if e.reserved != nil { // abandoned
		fill(e.reserved.buf, noiseFreed)
		e.w.recycle(e.reserved)
		e.reserved = nil
	}
	if e.err != nil || e.ended() {
		return nil
	}
	if !control && e.busy(diceBusy, e.w.cfg.Faults.Busy) || control && e.busy(diceControl, e.w.cfg.Faults.Tight) {
		return nil
	}
	n := min(hi, e.space(control))
	if n < lo {
		return nil
	}
	if !control && e.dice.chance(diceShort, e.w.cfg.Faults.Short) {
		n = lo + e.dice[diceShort].IntN(n-lo+1)
	}
	e.reserved, e.room = e.w.newMessage(e.limits.MaxMessage), n
	return e.reserved.buf[:n:n]
}

// busy makes the queue seem full for a while.
func (e *Endpoint) busy(which int, share float64) bool {
	if !e.dice.chance(which, share) {
		return false
	}
	if !e.seemsFull { // one notice for all who were told
		e.seemsFull = true
		e.w.at(e.w.now()+e.w.latency(&e.dice, diceBusy), event{end: e, kind: notBusy})
	}
	return true
}

func (e *Endpoint) Commit(n int) {
	e.sending++
	e.enter("Commit")
	defer e.leave()
	m := e.reserved
	e.reserved = nil
	if m == nil || n < 1 || n > e.room {
		e.w.violate(Misuse, e.id, "Commit(%d) of %d reserved", n, e.room)
		return
	}
	if e.err != nil || e.ended() || e.w.cut {
		fill(m.buf, noiseFreed)
		e.w.recycle(m)
		return
	}
	m.n = n
	fill(m.buf[n:e.room], noiseFreed)
	// What is in flight is a copy: the buffer that Reserve gave may be
	// looked at no more.
	flight := e.w.newMessage(e.limits.MaxMessage)
	flight.n = copy(flight.buf[:n], m.buf[:n])
	fill(m.buf[:n], noiseFreed)
	e.w.recycle(m)

	p := e.peer()
	if p.limits.Window > 0 {
		e.inSend++
	} else {
		flight.cost = n + ringHeader
		e.ringUsed += flight.cost
	}
	e.w.at(e.arrival(), event{end: p, kind: arrive, msg: flight})
	if e.dice.chance(diceStray, e.w.cfg.Faults.Stray) {
		e.wake(session.SendReady)
	}
}

// arrival draws when something sent now arrives, behind all that was sent or
// written.
func (e *Endpoint) arrival() (at time.Duration) {
	at = max(e.lastArrive, e.lastDone[opWrite], e.w.now()+e.w.latency(&e.dice, diceMessage))
	e.lastArrive = at
	return at
}

func (e *Endpoint) Poll(ev *session.Event) bool {
	e.receiving++
	e.enter("Poll")
	defer e.leave()
	if e.last != nil {
		e.w.violate(Misuse, e.id, "Poll before the last message was dropped or kept")
		return false
	}
	if e.dead {
		return false
	}
	// The completions of sends, reads and writes come from queues of their
	// own: which is looked at first is chance.
	first := e.dice[dicePoll].IntN(3)
	for i := range 3 {
		switch q := (first + i) % 3; {
		case q < 2 && e.completed[q].len() > 0:
			op := e.completed[q].pop()
			*ev = session.Event{Kind: op.kind.event(), ID: op.id, Err: op.err}
			e.spareOps = append(e.spareOps, op)
			e.opsOpen--
			e.w.at(e.w.now(), event{end: e, kind: room})
			return true
		case q == 2 && e.inbox.len() > 0:
			m := e.inbox.pop()
			e.last = m
			none := e.inbox.len()+e.completed[0].len()+e.completed[1].len() == 0
			*ev = session.Event{Kind: session.Message, Msg: m.buf[:m.n:m.n], Last: none && e.dice[dicePoll].IntN(2) == 0}
			return true
		}
	}
	return false
}

// finish gives a received message's buffer back.
func (e *Endpoint) finish(m *message) {
	fill(m.buf, noiseFreed)
	if e.limits.Window > 0 {
		e.posted++
		e.w.recycle(m)
		return
	}
	m.done = true
	freed := 0
	for e.ring.len() > 0 && e.ring.front().done {
		m := e.ring.pop()
		freed += m.cost
		e.w.recycle(m)
	}
	if freed > 0 {
		p := e.peer()
		p.ringUsed -= freed
		e.w.at(e.w.now(), event{end: p, kind: room})
	}
}

func (e *Endpoint) Drop() {
	e.receiving++
	e.enter("Drop")
	defer e.leave()
	if e.last == nil {
		e.w.violate(Misuse, e.id, "Drop without a message")
		return
	}
	m := e.last
	e.last = nil
	e.finish(m)
}

func (e *Endpoint) Keep() {
	e.receiving++
	e.enter("Keep")
	defer e.leave()
	if e.last == nil {
		e.w.violate(Misuse, e.id, "Keep without a message")
		return
	}
	e.kept.push(e.last)
	e.last = nil
}

func (e *Endpoint) Front() []byte {
	e.receiving++
	e.enter("Front")
	defer e.leave()
	if e.kept.len() == 0 {
		return nil
	}
	m := e.kept.front()
	return m.buf[:m.n:m.n]
}

func (e *Endpoint) Release() {
	e.receiving++
	e.enter("Release")
	defer e.leave()
	if e.kept.len() == 0 {
		e.w.violate(Misuse, e.id, "Release without a kept message")
		return
	}
	e.finish(e.kept.pop())
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
	case room:
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

func (e *Endpoint) arrived(m *message) {
	p := e.peer()
	if e.limits.Window > 0 && !p.ended() {
		e.w.at(e.w.now()+e.w.latency(&p.dice, diceAck), event{end: p, kind: sent})
	}
	if e.err != nil || e.ended() || e.w.cut {
		e.w.recycle(m)
		return
	}
	if m.n > e.limits.MaxMessage {
		e.w.violate(Misuse, p.id, "a message of %d bytes into a buffer of %d", m.n, e.limits.MaxMessage)
		m.n = e.limits.MaxMessage
	}
	if e.limits.Window > 0 {
		if e.posted == 0 {
			e.w.violate(RNR, p.id, "a message of %d bytes found no receive buffer", m.n)
			err := fmt.Errorf("twin: receiver not ready: %w", syscall.ECONNRESET)
			e.fail(err)
			p.fail(err)
			return
		}
		e.posted--
	} else {
		e.ring.push(m)
	}
	e.inbox.push(m)
	e.ready(session.RecvReady)
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
	errPeerEnd = fmt.Errorf("twin: the peer's process ended: %w", io.EOF)
	errAborted = fmt.Errorf("twin: aborted: %w", syscall.ECONNRESET)
	errLocal   = errors.New("twin: ended at this end")
)

func (e *Endpoint) Err() error {
	e.lock()
	defer e.w.mu.Unlock()
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
	if e.closed || e.aborted {
		return
	}
	e.closed, e.aborted = !abort, abort
	e.giveBack()
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

// giveBack returns what the end holds, and makes sure that nobody can go on
// using it unnoticed.
func (e *Endpoint) giveBack() {
	e.left = e.audit()
	for e.ops.len() > 0 {
		e.ops.pop().over = true
	}
	e.exposed = nil
	if e.last != nil {
		e.kept.push(e.last)
		e.last = nil
	}
	for e.kept.len() > 0 {
		fill(e.kept.pop().buf, noiseFreed)
	}
	for e.inbox.len() > 0 {
		fill(e.inbox.pop().buf, noiseFreed)
	}
	if e.reserved != nil {
		fill(e.reserved.buf, noiseFreed)
		e.reserved = nil
	}
}

// Kill ends this end's process at once: what it does from here on reaches
// nobody. The peer finds io.EOF where the provider is Buffered, else
// ECONNRESET, and what was under way is lost.
func (e *Endpoint) Kill() {
	e.w.mu.Lock()
	defer e.w.mu.Unlock()
	e.die()
}

// Killed says whether Kill, or Faults.DieAt, has ended this end's process.
func (e *Endpoint) Killed() bool {
	e.w.mu.Lock()
	defer e.w.mu.Unlock()
	return e.dead
}

func (e *Endpoint) die() {
	if e.ended() {
		return
	}
	p, now := e.peer(), e.w.now()
	for e.ops.len() > 0 { // no memory moves any more, but the zombie is told
		op := e.ops.pop()
		op.err = errKilled
		e.complete(op)
	}
	switch {
	case e.err != nil:
	case e.limits.Buffered:
		e.w.at(e.arrival(), event{end: p, kind: fin, err: errPeerEnd})
	default:
		e.w.at(now+e.w.latency(&e.dice, diceEnd), event{end: p, kind: fin, err: errVanish})
	}
	if e.err == nil {
		e.err = errKilled
	}
	e.dead = true
	e.wakes |= session.RecvReady | session.SendReady
	e.w.at(now, event{end: e, kind: stray})
}

// Cut the wire: from now on nothing arrives at either end, no memory moves
// and nobody is told.
func (e *Endpoint) Cut() {
	e.w.mu.Lock()
	defer e.w.mu.Unlock()
	e.w.cut = true
}

// Hold is what an end can be made to hold back.
type Hold uint8

const (
	HoldMessages Hold = 1 << iota // messages on their way to this end
	HoldReads                     // the completions of Reads that this end posted
	HoldWrites                    // the completions of its Writes
)

// Hold holds back what is named, and lets go of what was held and is not.
func (e *Endpoint) Hold(what Hold) {
	e.w.mu.Lock()
	defer e.w.mu.Unlock()
	e.held = what
	parked := e.parked
	e.parked = nil
	for _, ev := range parked {
		e.w.at(0, ev) // before all that is due now: order is kept
	}
}

// parks puts an event aside that is held back.
func (e *Endpoint) parks(ev event) bool {
	held := false
	switch ev.kind {
	case arrive:
		held = e.held&HoldMessages != 0
	case fin:
		held = e.held&HoldMessages != 0 && ev.err != errAborted && ev.err != errVanish
	case done:
		held = ev.op.kind == opRead && e.held&HoldReads != 0 || ev.op.kind == opWrite && e.held&HoldWrites != 0
	}
	if held {
		e.parked = append(e.parked, ev)
	}
	return held
}

// Left is what a session left behind.
type Left struct {
	Exposed   int // not revoked when the end was closed
	Allocated int // bytes not freed by now
	Kept      int // messages not released when the end was closed
	Posted    int // Reads and Writes without a completion when the end was closed
}

// Left says what the session left behind here; before Close or Abort, what it
// holds now.
func (e *Endpoint) Left() Left {
	e.w.mu.Lock()
	defer e.w.mu.Unlock()
	l := e.left
	if !e.closed && !e.aborted {
		l = e.audit()
	}
	l.Allocated = e.allocated
	return l
}

func (e *Endpoint) audit() Left {
	return Left{Exposed: len(e.exposed), Kept: e.kept.len(), Posted: e.ops.len()}
}

// Closed says whether Close or Abort was called.
func (e *Endpoint) Closed() bool {
	e.w.mu.Lock()
	defer e.w.mu.Unlock()
	return e.closed || e.aborted
}

// Calls is the number of calls into this end so far, as Faults.DieAt counts
// them.
func (e *Endpoint) Calls() int {
	e.w.mu.Lock()
	defer e.w.mu.Unlock()
	return e.calls
}
