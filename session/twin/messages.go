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

// room for a message that was reserved.
type room struct {
	m *message // nil: none
	n int      // bytes of it
}

// drop gives the room back.
func (r *room) drop(w *wire) {
	if r.m != nil {
		fill(r.m.buf, noiseFreed)
		w.recycle(r.m)
	}
	*r = room{}
}

// space is the size in bytes of the largest message that can be sent now beside
// the data message that is reserved; 0: none can.
func (e *Endpoint) space(control bool) int {
	if !e.limits.Ring() {
		free := e.w.cfg.SendQueue - e.inSend
		if e.data.m != nil {
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
	free := e.w.cfg.QueueBytes - e.ringUsed - ringHeader
	if e.data.m != nil {
		free -= e.data.n + ringHeader
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
		e.w.violate(Misuse, e.id, "Reserve(%d, %d)", lo, hi)
		return nil
	}
	if e.data.m != nil {
		e.w.violate(Misuse, e.id, "Reserve before the Commit of what was reserved")
		return nil
	}
	if e.err != nil || e.ended() || e.busy(diceBusy, e.w.cfg.Faults.Busy) {
		return nil
	}
	n := min(hi, e.space(false))
	if n < lo {
		return nil
	}
	if e.dice.chance(diceShort, e.w.cfg.Faults.Short) {
		n = lo + e.dice[diceShort].IntN(n-lo+1)
	}
	e.data = room{e.w.newMessage(e.limits.MaxMessage), n}
	return e.data.m.buf[:n:n]
}

func (e *Endpoint) ReserveControl(n int) []byte {
	e.sending++
	e.enter("ReserveControl")
	defer e.leave()
	if n < 1 || n > session.MaxControl {
		e.w.violate(Misuse, e.id, "ReserveControl(%d)", n)
		return nil
	}
	e.control.drop(e.w) // abandoned
	if e.err != nil || e.ended() || e.busy(diceControl, e.w.cfg.Faults.Tight) || e.space(true) < n {
		return nil
	}
	e.control = room{e.w.newMessage(e.limits.MaxMessage), n}
	e.control.m.control = true
	return e.control.m.buf[:n:n]
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
	if e.data.m == nil || n < 0 || n > e.data.n {
		e.w.violate(Misuse, e.id, "Commit(%d) of %d reserved", n, e.data.n)
		return
	}
	if n == 0 {
		e.w.at(e.w.now(), event{end: e, kind: hasRoom})
	} else {
		e.send(e.data.m, n)
	}
	e.data.drop(e.w)
}

func (e *Endpoint) CommitControl(n int) {
	e.sending++
	e.enter("CommitControl")
	defer e.leave()
	if e.control.m == nil || n != e.control.n {
		e.w.violate(Misuse, e.id, "CommitControl(%d) of %d reserved", n, e.control.n)
		return
	}
	e.send(e.control.m, n)
	e.control.drop(e.w)
}

// send sends the first n bytes of a message. What is in flight is a copy: the
// buffer that was reserved may be looked at no more.
func (e *Endpoint) send(m *message, n int) {
	if e.err != nil || e.ended() || e.w.cut {
		return
	}
	flight := e.w.newMessage(e.limits.MaxMessage)
	flight.n = copy(flight.buf, m.buf[:n])
	flight.control = m.control
	if !m.control {
		e.untaken++
	}
	if e.limits.Ring() {
		flight.cost = n + ringHeader
		e.ringUsed += flight.cost
	} else {
		e.inSend++
	}
	e.w.at(e.arrival(), event{end: e.peer(), kind: arrive, msg: flight})
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
			e.w.at(e.w.now(), event{end: e, kind: hasRoom})
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
	if !m.control {
		e.peer().untaken--
	}
	if !e.limits.Ring() {
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
		e.w.at(e.w.now(), event{end: p, kind: hasRoom})
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
