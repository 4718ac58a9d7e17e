package twin

import (
	"fmt"
	"syscall"
	"time"

	"github.com/sanconn/san/session"
)

// controlCost is the largest control message's share of the ring.
const controlCost = session.MaxControl + ringHeader

// ringHeader is what a message occupies in the ring beside its bytes.
const ringHeader = 8

// sender is what an end sends. The wire's lock guards it.
type sender struct {
	e          *Endpoint
	data       room          // what Reserve gave
	control    room          // what ReserveControl gave
	inSend     int           // messages in the send queue (with a Window)
	ringUsed   int           // bytes of the ring towards the peer
	untaken    int           // data messages that the peer has neither dropped nor released
	seemsFull  bool          // an event is scheduled to note that the queue is not full, as it never was
	lastArrive time.Duration // time of the last arrival scheduled at the peer
}

// receiver is what an end receives. The wire's lock guards it.
type receiver struct {
	e      *Endpoint
	posted int // receive buffers (with a Window)
	inbox  fifo[*message]
	last   *message // of the last Poll, to be dropped or kept
	kept   fifo[*message]
	ring   fifo[*message] // what occupies the peer's ring towards here, in order
}

// room is room for a reserved message.
type room struct {
	m *message // nil: none
	n int      // bytes of it
}

// dropLocked gives the room back.
func (r *room) dropLocked(w *wire) {
	if r.m != nil {
		fill(r.m.buf, noiseFreed)
		w.recycleLocked(r.m)
	}
	*r = room{}
}

// spaceLocked returns the size in bytes of the largest message that can be sent now beside the reserved
// data message, or 0.
func (tx *sender) spaceLocked(control bool) int {
	e := tx.e
	if !e.limits.Ring() {
		free := e.w.cfg.SendQueue - tx.inSend
		if tx.data.m != nil {
			free--
		}
		if !control {
			free -= session.ControlReserve
		}
		if free <= 0 {
			return 0
		}
		return e.limits.MaxMessage
	}
	free := e.w.cfg.QueueBytes - tx.ringUsed - ringHeader
	if tx.data.m != nil {
		free -= tx.data.n + ringHeader
	}
	if !control {
		free -= session.ControlReserve * controlCost
	}
	return min(free, e.limits.MaxMessage)
}

func (e *Endpoint) Reserve(lo, hi int) []byte {
	e.sending++
	e.enter("Reserve")
	defer e.leave()
	if lo < 1 || lo > hi || hi > e.limits.MaxMessage {
		e.w.violateLocked(Misuse, e.id, "Reserve(%d, %d)", lo, hi)
		return nil
	}
	if e.tx.data.m != nil {
		e.w.violateLocked(Misuse, e.id, "Reserve before the Commit of what was reserved")
		return nil
	}
	if e.err != nil || e.endedLocked() || e.tx.busyLocked(diceBusy, e.w.cfg.Faults.Busy) {
		return nil
	}
	n := min(hi, e.tx.spaceLocked(false))
	if n < lo {
		return nil
	}
	if e.dice.chance(diceShort, e.w.cfg.Faults.Short) {
		n = lo + e.dice[diceShort].IntN(n-lo+1)
	}
	e.tx.data = room{e.w.newMessageLocked(e.limits.MaxMessage), n}
	return e.tx.data.m.buf[:n:n]
}

func (e *Endpoint) ReserveControl(n int) []byte {
	e.sending++
	e.enter("ReserveControl")
	defer e.leave()
	if n < 1 || n > session.MaxControl {
		e.w.violateLocked(Misuse, e.id, "ReserveControl(%d)", n)
		return nil
	}
	e.tx.control.dropLocked(e.w) // abandoned
	if e.err != nil || e.endedLocked() || e.tx.busyLocked(diceControl, e.w.cfg.Faults.Tight) || e.tx.spaceLocked(true) < n {
		return nil
	}
	e.tx.control = room{e.w.newMessageLocked(e.limits.MaxMessage), n}
	e.tx.control.m.control = true
	return e.tx.control.m.buf[:n:n]
}

// busyLocked makes the queue seem full for a while.
func (tx *sender) busyLocked(which int, share float64) bool {
	e := tx.e
	if !e.dice.chance(which, share) {
		return false
	}
	if !tx.seemsFull { // one notice for all that have found it full
		tx.seemsFull = true
		e.w.scheduleLocked(e.w.nowLocked()+e.w.latency(&e.dice, diceBusy), event{end: e, kind: notBusy})
	}
	return true
}

func (e *Endpoint) Commit(n int) {
	e.sending++
	e.enter("Commit")
	defer e.leave()
	if e.tx.data.m == nil || n < 0 || n > e.tx.data.n {
		e.w.violateLocked(Misuse, e.id, "Commit(%d) of %d reserved", n, e.tx.data.n)
		return
	}
	if n == 0 {
		e.w.scheduleLocked(e.w.nowLocked(), event{end: e, kind: hasRoom})
	} else {
		e.tx.sendLocked(e.tx.data.m, n)
	}
	e.tx.data.dropLocked(e.w)
}

func (e *Endpoint) CommitControl(n int) { e.commitControl(n, 0) }

// commitControl sends a reserved control message, with which this end gives its access by a key of the
// peer back, unless the key is 0.
func (e *Endpoint) commitControl(n int, returns uint64) {
	e.sending++
	e.enter("CommitControl")
	defer e.leave()
	if e.tx.control.m == nil || n != e.tx.control.n {
		e.w.violateLocked(Misuse, e.id, "CommitControl(%d) of %d reserved", n, e.tx.control.n)
		return
	}
	e.tx.control.m.returns = returns
	e.tx.sendLocked(e.tx.control.m, n)
	e.tx.control.dropLocked(e.w)
}

// sendLocked sends the first n bytes of a message. A copy is in flight: the reserved buffer may not be
// read any more.
func (tx *sender) sendLocked(m *message, n int) {
	e := tx.e
	if e.err != nil || e.endedLocked() || e.w.cut {
		return
	}
	flight := e.w.newMessageLocked(e.limits.MaxMessage)
	flight.n = copy(flight.buf, m.buf[:n])
	flight.control, flight.returns = m.control, m.returns
	if !m.control {
		tx.untaken++
	}
	if e.limits.Ring() {
		flight.cost = n + ringHeader
		tx.ringUsed += flight.cost
	} else {
		tx.inSend++
	}
	e.w.scheduleLocked(tx.arrivalLocked(), event{end: e.peer(), kind: arrive, msg: flight})
	if e.dice.chance(diceStray, e.w.cfg.Faults.Stray) {
		e.wakeLocked(session.SendReady)
	}
}

// arrivalLocked draws when something that is sent now arrives, after all that was sent or written
// before.
func (tx *sender) arrivalLocked() (at time.Duration) {
	e := tx.e
	at = max(tx.lastArrive, e.mem.lastDone[opWrite], e.w.nowLocked()+e.w.latency(&e.dice, diceMessage))
	tx.lastArrive = at
	return at
}

func (e *Endpoint) Poll(ev *session.Event) bool {
	e.receiving++
	e.enter("Poll")
	defer e.leave()
	if e.rx.last != nil {
		e.w.violateLocked(Misuse, e.id, "Poll before the last message was dropped or kept")
		return false
	}
	if e.dead {
		return false
	}
	// The completions of sends, reads and writes come from separate queues: chance decides which is
	// polled first.
	first := e.dice[dicePoll].IntN(3)
	for i := range 3 {
		switch q := (first + i) % 3; {
		case q < 2 && e.mem.completed[q].len() > 0:
			op := e.mem.completed[q].pop()
			*ev = session.Event{Kind: op.kind.event(), ID: op.id, Err: op.err}
			e.mem.spare = append(e.mem.spare, op)
			e.mem.open--
			e.w.scheduleLocked(e.w.nowLocked(), event{end: e, kind: hasRoom})
			return true
		case q == 2 && e.rx.inbox.len() > 0:
			m := e.rx.inbox.pop()
			e.rx.last = m
			none := e.rx.inbox.len()+e.mem.completed[0].len()+e.mem.completed[1].len() == 0
			*ev = session.Event{Kind: session.Message, Msg: m.buf[:m.n:m.n], Last: none && e.dice[dicePoll].IntN(2) == 0}
			return true
		}
	}
	return false
}

// finishLocked gives back a received message's buffer.
func (rx *receiver) finishLocked(m *message) {
	e := rx.e
	fill(m.buf, noiseFreed)
	if !m.control {
		e.peer().tx.untaken--
	}
	if !e.limits.Ring() {
		rx.posted++
		e.w.recycleLocked(m)
		return
	}
	m.done = true
	freed := 0
	for rx.ring.len() > 0 && rx.ring.front().done {
		m := rx.ring.pop()
		freed += m.cost
		e.w.recycleLocked(m)
	}
	if freed > 0 {
		p := e.peer()
		p.tx.ringUsed -= freed
		e.w.scheduleLocked(e.w.nowLocked(), event{end: p, kind: hasRoom})
	}
}

func (e *Endpoint) Drop() {
	e.receiving++
	e.enter("Drop")
	defer e.leave()
	if e.rx.last == nil {
		e.w.violateLocked(Misuse, e.id, "Drop without a message")
		return
	}
	m := e.rx.last
	e.rx.last = nil
	e.rx.finishLocked(m)
}

func (e *Endpoint) Keep() {
	e.receiving++
	e.enter("Keep")
	defer e.leave()
	if e.rx.last == nil {
		e.w.violateLocked(Misuse, e.id, "Keep without a message")
		return
	}
	e.rx.kept.push(e.rx.last)
	e.rx.last = nil
}

func (e *Endpoint) Front() []byte {
	e.receiving++
	e.enter("Front")
	defer e.leave()
	if e.rx.kept.len() == 0 {
		return nil
	}
	m := e.rx.kept.front()
	return m.buf[:m.n:m.n]
}

func (e *Endpoint) Release() {
	e.receiving++
	e.enter("Release")
	defer e.leave()
	if e.rx.kept.len() == 0 {
		e.w.violateLocked(Misuse, e.id, "Release without a kept message")
		return
	}
	e.rx.finishLocked(e.rx.kept.pop())
}

func (rx *receiver) arrivedLocked(m *message) {
	e := rx.e
	p := e.peer()
	if !e.limits.Ring() && !p.endedLocked() {
		e.w.scheduleLocked(e.w.nowLocked()+e.w.latency(&p.dice, diceAck), event{end: p, kind: sent})
	}
	if e.err != nil || e.endedLocked() || e.w.cut {
		e.w.recycleLocked(m)
		return
	}
	if m.n > e.limits.MaxMessage {
		e.w.violateLocked(Misuse, p.id, "a message of %d bytes into a buffer of %d", m.n, e.limits.MaxMessage)
		m.n = e.limits.MaxMessage
	}
	if m.returns != 0 {
		e.mem.returnedLocked(m.returns)
	}
	if !e.limits.Ring() {
		if rx.posted == 0 {
			e.w.violateLocked(RNR, p.id, "a message of %d bytes found no receive buffer", m.n)
			err := fmt.Errorf("twin: receiver not ready: %w", syscall.ECONNRESET)
			e.failLocked(err)
			p.failLocked(err)
			return
		}
		rx.posted--
	} else {
		rx.ring.push(m)
	}
	rx.inbox.push(m)
	e.readyLocked(session.RecvReady)
}
