package verbs

import (
	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/session"
)

// Sending: messages leave from a ring of bytes, control messages from slots of
// their own so that data cannot take their room. A message that fits the
// device's inline limit is copied when it is posted and takes no room at all.
// One work request in signalEvery asks for a completion, which frees what all
// before it used; on iWARP each does that was not copied.
type sendState struct {
	head, tail uint64 // of the ring, bytes since the beginning
	slots      int    // control slots in use
	nextSlot   int
	posted     uint64 // messages
	sentUpTo   uint64 // of them, known to have left
	sends      fifo[sendRecord]
	unsignaled int // messages since the last that asked for a completion
	unsignBy   int // bytes of the ring that they use

	reserved  []byte // what Reserve gave, nil if nothing
	reserveAt int    // its place in the send region
	skip      int    // bytes left unused at the ring's end before it
	inSlot    bool

	wr [1]ibv.SendWR
}

// sendRecord is what a message that was posted occupies.
type sendRecord struct {
	ring int // bytes
	slot bool
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
)

func (e *Endpoint) initSend() {
	e.sends = newFIFO[sendRecord](maxSends + ownMessages)
}

// Reserve implements session.Endpoint.
func (e *Endpoint) Reserve(lo, hi int, control bool) []byte {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.reserved = nil
	if e.gone || e.failing != nil {
		return nil
	}
	if !e.reserve(lo, hi, control) {
		e.drain()
		if e.failing != nil || !e.reserve(lo, hi, control) {
			return nil
		}
	}
	return e.reserved
}

func (e *Endpoint) reserve(lo, hi int, control bool) bool {
	limit := maxSends
	if !control {
		limit -= session.ControlReserve
	}
	if e.sends.n >= limit {
		return false
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
	at := 0
	if e.head != 0 { // it is for messages that are inline: a division takes longer than all the rest
		at = int(e.head % uint64(size))
	}
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
	e.reserved = e.sendR.mem[e.reserveAt:][:n:n]
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
	var rec sendRecord
	wr := &e.wr[0]
	*wr = ibv.SendWR{Opcode: ibv.OpSend, NumSGE: 1}
	wr.SGE[0] = ibv.SGE{Addr: uint64(addressOf(e.sendR.mem)) + uint64(e.reserveAt), Length: uint32(n), LKey: e.sendR.mr.LKey}
	switch {
	case n <= e.inline: // copied now: the room is free again
		wr.Flags = ibv.Inline
	case e.inSlot:
		rec.slot = true
		e.slots++
		e.nextSlot = (e.nextSlot + 1) % controlSlots
	default:
		// Never beyond what was free: its end is a multiple of the line.
		used := min((n+cacheLine-1)&^(cacheLine-1), e.cfg.SendBuffer-e.reserveAt)
		rec.ring = e.skip + used
		e.head += uint64(rec.ring)
	}
	e.postSend(wr, rec, false)
}

// postSend posts one message. mu is held.
func (e *Endpoint) postSend(wr *ibv.SendWR, rec sendRecord, signal bool) {
	e.posted++
	wr.ID = kindSend | e.posted
	e.unsignaled++
	e.unsignBy += rec.ring
	// A completion means on iWARP that TCP has the bytes. What siw sends without
	// one it sends from our memory, which TCP then reads again, whenever it likes
	// (siw_qp_tx.c, use_sendpage).
	copied := wr.Flags&ibv.Inline != 0
	if signal || !copied && e.dev.iwarp() || e.unsignaled >= signalEvery || e.unsignBy >= e.cfg.SendBuffer/4 {
		wr.Flags |= ibv.Signaled
		e.unsignaled, e.unsignBy = 0, 0
	}
	e.sends.push(rec)
	if _, err := e.qp.PostSend(e.wr[:]); err != nil {
		e.fail(lost(err))
	}
}

// sayEmpty posts the provider's own message: a greeting at the beginning, the
// farewell at the end.
func (e *Endpoint) sayEmpty() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.failing == nil && !e.gone {
		e.wr[0] = ibv.SendWR{Opcode: ibv.OpSend}
		e.postSend(&e.wr[0], sendRecord{}, true)
	}
}

// sent frees what messages up to this one used. mu is held.
func (e *Endpoint) sent(wc *ibv.WC) {
	for upTo := wc.ID &^ kindMask; e.sentUpTo < upTo && e.sends.n > 0; e.sentUpTo++ {
		rec := e.sends.pop()
		e.tail += uint64(rec.ring)
		if rec.slot {
			e.slots--
		}
	}
}
