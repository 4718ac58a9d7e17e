package verbs

import (
	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/session"
)

// Sending: messages leave from a ring of bytes, control messages from slots of
// their own so that data cannot take their room. A message that fits the
// device's inline limit is copied when it is posted; such messages are written to
// one place after ring and slots, or, if they are control, to the one behind it. One work request in signalEvery asks for a
// completion, which frees the room of all up to it; on iWARP each that is not copied does.
type sendState struct {
	head, tail uint64 // of the ring, bytes since the beginning
	slots      int    // control slots in use
	nextSlot   int
	posted     uint64 // messages
	sentUpTo   uint64 // messages known to have left
	used       fifo[sendRecord]
	unsignaled int // messages since the last that asked for a completion
	unsignBy   int // bytes of the ring that they use

	data    reservation
	control reservation

	wr [1]ibv.SendWR
}

// reservation is room for a message that was not committed yet.
type reservation struct {
	room   []byte // nil: there is none
	at     int    // its place in the send region
	skip   int    // bytes left unused at the ring's end before it
	inSlot bool
}

// sendRecord is what a message that was posted occupies, if it occupies anything.
type sendRecord struct {
	message uint64 // its number
	ring    int    // bytes
	slot    bool
}

const (
	// controlSlots of session.MaxControl bytes each: twice the reserve, as
	// they come free in groups.
	controlSlots = 2 * session.ControlReserve
	// signalEvery: often enough that control slots and a quarter of the ring
	// suffice until the next completion.
	signalEvery = 8
	// cacheLine aligns messages in the ring.
	cacheLine = 64
	// maxInline is the longest message in bytes that is copied when it is posted.
	maxInline = 256
)

func (e *Endpoint) initSend() {
	e.used = newFIFO[sendRecord](maxSends)
}

// underway is how many messages may not have left yet. mu is held.
func (e *Endpoint) underway() int { return int(e.posted - e.sentUpTo) }

// Reserve implements session.Messages.
func (e *Endpoint) Reserve(lo, hi int) []byte {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.gone || e.failing != nil {
		return nil
	}
	if !e.reserve(lo, hi) {
		e.drain()
		if e.failing != nil || !e.reserve(lo, hi) {
			return nil
		}
	}
	return e.data.room
}

// ReserveControl implements session.Messages.
func (e *Endpoint) ReserveControl(n int) []byte {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.gone || e.failing != nil {
		return nil
	}
	if !e.reserveControl(n) {
		e.drain()
		if e.failing != nil || !e.reserveControl(n) {
			return nil
		}
	}
	return e.control.room
}

// reserveControl reserves n bytes for control. mu is held.
func (e *Endpoint) reserveControl(n int) bool {
	e.control = reservation{}
	limit := maxSends
	if e.data.room != nil {
		limit-- // its place in the send queue
	}
	if e.underway() >= limit {
		return false
	}
	if n <= e.inline {
		e.control.at = e.cfg.inlineAt() + maxInline
	} else {
		if e.slots == controlSlots {
			return false
		}
		e.control.inSlot = true
		e.control.at = e.cfg.SendBuffer + e.nextSlot*session.MaxControl
	}
	e.control.room = e.sendRegion.mem[e.control.at:][:n:n]
	return true
}

// reserve reserves lo to hi bytes for data. mu is held.
func (e *Endpoint) reserve(lo, hi int) bool {
	e.data = reservation{}
	if e.underway() >= maxSends-session.ControlReserve {
		return false
	}
	if hi <= e.inline {
		e.data.at = e.cfg.inlineAt()
		e.data.room = e.sendRegion.mem[e.data.at:][:hi:hi]
		return true
	}
	size := e.cfg.SendBuffer
	if e.head == e.tail {
		e.head, e.tail = 0, 0 // empty: no need to go round
	}
	free := size - int(e.head-e.tail)
	at := int(e.head % uint64(size))
	skip := 0
	if rest := size - at; rest < lo {
		skip = rest
		free -= rest
		at = 0
	} else {
		free = min(free, rest)
	}
	if free < lo {
		return false
	}
	n := min(hi, free)
	e.data = reservation{room: e.sendRegion.mem[at:][:n:n], at: at, skip: skip}
	return true
}

// Commit implements session.Messages.
func (e *Endpoint) Commit(n int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.commit(&e.data, n)
}

// CommitControl implements session.Messages.
func (e *Endpoint) CommitControl(n int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.commit(&e.control, n)
}

// commit posts the first n bytes of what was reserved. mu is held.
func (e *Endpoint) commit(from *reservation, n int) {
	r := *from
	*from = reservation{}
	if n == 0 || r.room == nil || e.gone || e.failing != nil {
		return
	}
	wr := &e.wr[0]
	*wr = ibv.SendWR{Opcode: ibv.OpSend, NumSGE: 1}
	wr.SGE[0] = ibv.SGE{Addr: uint64(addressOf(e.sendRegion.mem)) + uint64(r.at), Length: uint32(n), LKey: e.sendRegion.mr.LKey}
	switch {
	case n <= e.inline: // copied now: the room is free again
		wr.Flags = ibv.Inline
	case r.inSlot:
		e.used.push(sendRecord{message: e.posted + 1, slot: true})
		e.slots++
		e.nextSlot = (e.nextSlot + 1) % controlSlots
	default:
		// Rounding up stays within what was free, whose end is a multiple of cacheLine.
		used := min((n+cacheLine-1)&^(cacheLine-1), e.cfg.SendBuffer-r.at)
		ring := r.skip + used
		e.used.push(sendRecord{message: e.posted + 1, ring: ring})
		e.head += uint64(ring)
		e.unsignBy += ring
	}
	e.postSend(wr, false)
}

// postSend posts one message. mu is held.
func (e *Endpoint) postSend(wr *ibv.SendWR, signal bool) {
	e.posted++
	wr.ID = kindSend | e.posted
	e.unsignaled++
	// On iWARP a completion means that TCP has the bytes. Without one siw sends from
	// our memory itself, which TCP may read again at any later time (siw_qp_tx.c,
	// use_sendpage).
	copied := wr.Flags&ibv.Inline != 0
	if signal || !copied && e.dev.iwarp() || e.unsignaled >= signalEvery || e.unsignBy >= e.cfg.SendBuffer/4 {
		wr.Flags |= ibv.Signaled
		e.unsignaled, e.unsignBy = 0, 0
	}
	if _, err := e.qp.PostSend(e.wr[:]); err != nil {
		e.fail(deviceError(err))
	}
}

// sayEmpty posts the provider's own message: a greeting at the beginning, the
// farewell at the end.
func (e *Endpoint) sayEmpty() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.failing == nil && !e.gone {
		e.wr[0] = ibv.SendWR{Opcode: ibv.OpSend}
		e.postSend(&e.wr[0], true)
	}
}

// sent frees what messages up to this one used. mu is held.
func (e *Endpoint) sent(wc *ibv.WC) {
	e.sentUpTo = max(e.sentUpTo, min(wc.ID&^kindMask, e.posted))
	for e.used.n > 0 && e.used.at(0).message <= e.sentUpTo {
		rec := e.used.pop()
		e.tail += uint64(rec.ring)
		if rec.slot {
			e.slots--
		}
	}
}
