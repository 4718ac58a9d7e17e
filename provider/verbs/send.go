package verbs

import (
	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/session"
)

// sendQueue sends messages. Data leaves from a ring of bytes; control messages leave from slots, so
// that data cannot take their room. A message within the device's inline limit is copied when it is
// posted, so its place is free again at once: there are two such places after the ring and the slots,
// one for data and one for control. One in signalEvery work requests is signaled. Its completion frees
// the room of all messages up to it.
type sendQueue struct {
	q            *queuePair
	mem          []byte // ring, slots and inline messages
	mr           *ibv.MR
	ringSize     int  // in bytes
	inline       int  // in bytes
	alwaysSignal bool // signal each message that is not inline: see open

	// The fields below are guarded by mu of q.
	head, tail      uint64 // of the ring, in bytes since the beginning
	slots           int    // control slots in use
	nextSlot        int
	posted          uint64 // number of messages
	sentUpTo        uint64 // number of messages known to have left
	used            fifo[sendRecord]
	unsignaled      int // messages since the last signaled one
	unsignaledBytes int // bytes of the ring that these use

	data    reservation
	control reservation

	wr [1]ibv.SendWR
}

// reservation is room for a message that is not committed yet.
type reservation struct {
	room   []byte // nil: none
	at     int    // its place in the send region
	skip   int    // unused bytes at the ring's end before it
	inSlot bool
}

// sendRecord is the room that a posted message occupies, if any.
type sendRecord struct {
	message uint64 // its number
	ring    int    // in bytes
	slot    bool
}

const (
	// controlSlots slots of session.MaxControl bytes: twice the reserve, because they become free in
	// groups.
	controlSlots = 2 * session.ControlReserve
	// signalEvery: often enough that control slots and a quarter of the ring suffice until the next
	// completion.
	signalEvery = 8
	// cacheLine aligns messages in the ring.
	cacheLine = 64
	// maxInline is the size in bytes of the longest message that is copied when it is posted. With it a
	// send takes 448 bytes of mlx5's queue; see maxSends.
	maxInline = 224
)

// open takes over the memory that messages are sent from. On iWARP a completion means that TCP has the
// bytes. Without a completion siw may still send from this memory (use_sendpage in sw/siw/siw_qp_tx.c).
func (s *sendQueue) open(q *queuePair, cfg Config, iwarp bool, mem []byte, mr *ibv.MR) {
	s.q, s.mem, s.mr = q, mem, mr
	s.ringSize = cfg.sendBuffer
	s.alwaysSignal = iwarp
	s.used = newFIFO[sendRecord](maxSends)
}

// slotAt and inlineAt return offsets in the send region, after the ring.
func (s *sendQueue) slotAt(n int) int { return s.ringSize + n*session.MaxControl }
func (s *sendQueue) inlineAt() int    { return s.slotAt(controlSlots) }

// underwayLocked returns how many messages may not have left yet.
func (s *sendQueue) underwayLocked() int { return int(s.posted - s.sentUpTo) }

// reserveLocked reserves lo to hi bytes for data, or returns nil if there is no room.
func (s *sendQueue) reserveLocked(lo, hi int) []byte {
	s.data = reservation{}
	if s.underwayLocked() >= maxSends-session.ControlReserve {
		return nil
	}
	if hi <= s.inline {
		at := s.inlineAt()
		s.data = reservation{room: s.mem[at:][:hi:hi], at: at}
		return s.data.room
	}
	if s.head == s.tail {
		s.head, s.tail = 0, 0 // empty: begin at the start
	}
	free := s.ringSize - int(s.head-s.tail)
	at := int(s.head % uint64(s.ringSize))
	skip := 0
	if rest := s.ringSize - at; rest < lo {
		skip = rest
		free -= rest
		at = 0
	} else {
		free = min(free, rest)
	}
	if free < lo {
		return nil
	}
	n := min(hi, free)
	s.data = reservation{room: s.mem[at:][:n:n], at: at, skip: skip}
	return s.data.room
}

// reserveControlLocked reserves n bytes for control, or returns nil if there is no room.
func (s *sendQueue) reserveControlLocked(n int) []byte {
	s.control = reservation{}
	limit := maxSends
	if s.data.room != nil {
		limit-- // a data reservation keeps its place in the send queue
	}
	switch {
	case s.underwayLocked() >= limit:
		return nil
	case n <= s.inline:
		s.control.at = s.inlineAt() + maxInline
	case s.slots == controlSlots:
		return nil
	default:
		s.control.inSlot = true
		s.control.at = s.slotAt(s.nextSlot)
	}
	s.control.room = s.mem[s.control.at:][:n:n]
	return s.control.room
}

// commit posts the first n bytes of a reservation. If returns is not 0, the peer's device invalidates
// this key of the peer's with the message.
func (s *sendQueue) commit(from *reservation, n int, returns uint32) {
	s.q.mu.Lock()
	defer s.q.mu.Unlock()
	r := *from
	*from = reservation{}
	if n == 0 || r.room == nil || s.q.overLocked() {
		return
	}
	wr := &s.wr[0]
	at := ibv.SGE{Addr: uint64(addressOf(s.mem)) + uint64(r.at), Length: uint32(n), LKey: s.mr.LKey}
	*wr = ibv.SendWR{Opcode: ibv.OpSend, SGE: at}
	if returns != 0 {
		wr.Opcode, wr.InvKey = ibv.OpSendWithInv, returns
	}
	switch {
	case n <= s.inline: // copied now: the room is free again
		wr.Flags = ibv.Inline
	case r.inSlot:
		s.used.push(sendRecord{message: s.posted + 1, slot: true})
		s.slots++
		s.nextSlot = (s.nextSlot + 1) % controlSlots
	default:
		// The rounded size stays within the free room, whose end is a multiple of cacheLine.
		used := min((n+cacheLine-1)&^(cacheLine-1), s.ringSize-r.at)
		ring := r.skip + used
		s.used.push(sendRecord{message: s.posted + 1, ring: ring})
		s.head += uint64(ring)
		s.unsignaledBytes += ring
	}
	s.postLocked(false)
}

// postEmpty sends a message of the provider's own, which has no bytes.
func (s *sendQueue) postEmpty() {
	s.q.mu.Lock()
	s.postEmptyLocked(ibv.OpSend)
	s.q.mu.Unlock()
}

// postEmptyLocked posts a message or an RDMA write of no bytes.
func (s *sendQueue) postEmptyLocked(op ibv.Opcode) {
	if !s.q.overLocked() {
		s.wr[0] = ibv.SendWR{Opcode: op}
		s.postLocked(true)
	}
}

// postLocked posts wr.
func (s *sendQueue) postLocked(signal bool) {
	wr := &s.wr[0]
	s.posted++
	wr.ID = kindSend | s.posted
	s.unsignaled++
	fromMemory := wr.Flags&ibv.Inline == 0
	if signal || fromMemory && s.alwaysSignal || s.unsignaled >= signalEvery || s.unsignaledBytes >= s.ringSize/4 {
		wr.Flags |= ibv.Signaled
		s.unsignaled, s.unsignaledBytes = 0, 0
	}
	if _, err := s.q.qp.PostSend(s.wr[:]); err != nil {
		s.q.failLocked(deviceError(err))
	}
}

// sentLocked frees what messages up to this completion used.
func (s *sendQueue) sentLocked(wc *ibv.WC) {
	s.sentUpTo = max(s.sentUpTo, min(wc.ID&^kindMask, s.posted))
	for s.used.n > 0 && s.used.at(0).message <= s.sentUpTo {
		rec := s.used.pop()
		s.tail += uint64(rec.ring)
		if rec.slot {
			s.slots--
		}
	}
}
