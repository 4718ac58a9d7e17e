package verbs

import (
	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/session"
)

// Sending: messages leave from a ring of bytes, control messages from slots of
// their own so that data cannot take their room. A message that fits the
// device's inline limit is copied when it is posted; all such messages are written to
// the same place after ring and slots. One work request in signalEvery asks for a
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

	reserved  []byte // what Reserve gave, nil if nothing
	reserveAt int    // its place in the send region
	skip      int    // bytes left unused at the ring's end before it
	inSlot    bool

	wr [1]ibv.SendWR
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

// Reserve implements session.Endpoint.
func (e *Endpoint) Reserve(lo, hi int, control bool) []byte {
	e.mu.Lock()
	e.reserved = nil
	if !e.gone && e.failing == nil && !e.reserve(lo, hi, control) {
		e.drain()
		if e.failing == nil {
			e.reserve(lo, hi, control)
		}
	}
	room := e.reserved
	e.mu.Unlock()
	return room
}

func (e *Endpoint) reserve(lo, hi int, control bool) bool {
	limit := maxSends
	if !control {
		limit -= session.ControlReserve
	}
	if e.underway() >= limit {
		return false
	}
	if hi <= e.inline {
		e.reserveAt = e.cfg.SendBuffer + controlSlots*session.MaxControl
		return e.give(hi)
	}
	if control {
		if e.slots == controlSlots {
			return false
		}
		e.inSlot, e.skip = true, 0
		e.reserveAt = e.cfg.SendBuffer + e.nextSlot*session.MaxControl
		return e.give(min(hi, session.MaxControl))
	}
	size := e.cfg.SendBuffer
	if e.head == e.tail {
		e.head, e.tail = 0, 0 // empty: no need to go round
	}
	free := size - int(e.head-e.tail)
	at := int(e.head % uint64(size))
	e.inSlot, e.skip = false, 0
	if rest := size - at; rest < lo {
		e.skip = rest
		free -= rest
		at = 0
	} else {
		free = min(free, rest)
	}
	if free < lo {
		return false
	}
	e.reserveAt = at
	return e.give(min(hi, free))
}

func (e *Endpoint) give(n int) bool {
	e.reserved = e.sendRegion.mem[e.reserveAt:][:n:n]
	return true
}

// Commit implements session.Endpoint.
func (e *Endpoint) Commit(n int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.reserved == nil || e.gone || e.failing != nil {
		return
	}
	e.reserved = nil
	wr := &e.wr[0]
	*wr = ibv.SendWR{Opcode: ibv.OpSend, NumSGE: 1}
	wr.SGE[0] = ibv.SGE{Addr: uint64(addressOf(e.sendRegion.mem)) + uint64(e.reserveAt), Length: uint32(n), LKey: e.sendRegion.mr.LKey}
	switch {
	case n <= e.inline: // copied now: the room is free again
		wr.Flags = ibv.Inline
	case e.inSlot:
		e.used.push(sendRecord{message: e.posted + 1, slot: true})
		e.slots++
		e.nextSlot = (e.nextSlot + 1) % controlSlots
	default:
		// Rounding up stays within what was free, whose end is a multiple of cacheLine.
		used := min((n+cacheLine-1)&^(cacheLine-1), e.cfg.SendBuffer-e.reserveAt)
		ring := e.skip + used
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
