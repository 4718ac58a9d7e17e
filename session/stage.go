package session

import "time"

// Staging: where a Write of moderate size leaves its bytes, so that it need not
// wait until the peer has them (D8). They lie in a ring of the provider's
// memory that the peer may read as long as the connection lasts (it holds
// nothing but bytes for this peer), and several offers of them may be open at a
// time: while the peer reads one, the next is on its way. The last part of a
// large Write goes this way too, so that the next Write's offer finds the peer
// at work. What the peer cannot read leaves as payload.

// stage is the ring. Guarded by tx.mu; buf and desc change under wr.op too.
// Positions count bytes since the start of the connection.
type stage struct {
	buf  []byte
	desc Descriptor

	freed   int64 // up to here the room is free again
	sent    int64 // … it was offered or sent
	tail    int64 // … it is filled
	payload bool  // what was not sent leaves as payload
	shy     int   // Writes that are not staged because the peer could not read, or there was no memory
	resting bool  // idleStage will look again
}

// openOffer is an offer to read that is not over.
type openOffer struct {
	id    uint32
	own   bool // memory of the Write that is inside: tx.out
	from  int64
	to    int64 // the staged bytes that are offered; none, if own
	total int
}

const (
	// maxOpen offers may be open at a time in a direction. From fewOpen on what
	// is staged piles up to a share of the ring before it is offered: an offer
	// costs the same, however large it is, and two keep the peer at work.
	maxOpen   = 8
	fewOpen   = 2
	pileShare = 8
	// stageUnit is how much is copied before it is offered.
	stageUnit = 64 << 10
	// stageTail is the most of a large Write that is staged.
	stageTail = 128 << 10
	// shyness: after memory ran out here or at the peer.
	shyness = 32
	// exposeShare of what may be exposed at a time is for the ring, which stays
	// exposed: where memory that can be registered is short it is small.
	exposeShare = 8
	// stageRest is how long the ring is kept for a connection that does nothing.
	stageRest = time.Second
)

func (st *stage) unsent() int { return int(st.tail - st.sent) }

func (st *stage) room() int { return len(st.buf) - int(st.tail-st.freed) }

// openStage gets the ring if there is none. wr.op is held.
func (s *Session) openStage() {
	tx := &s.tx
	st := &tx.stage
	tx.mu.Lock()
	have := st.buf != nil || s.gone
	try := !have && st.shy == 0
	if try {
		st.shy = shyness
	} else if !have {
		st.shy--
	}
	tx.mu.Unlock()
	if !try {
		return
	}
	const limit = 1 << 30 // offsets have 32 bits
	size := min(s.cfg.SendBudget, max(s.lim.MaxExpose/exposeShare, 1), limit)
	buf := s.ep.Alloc(size)
	for buf == nil && size > stageUnit { // where memory is short
		size /= 4
		buf = s.ep.Alloc(size)
	}
	if buf == nil {
		return
	}
	clear(buf) // what it held was not meant for this peer
	d, err := s.ep.Expose(buf, RemoteRead)
	if err != nil {
		s.ep.Free(buf)
		return
	}
	tx.mu.Lock()
	st.buf, st.desc, st.shy = buf, d, 0
	tx.mu.Unlock()
}

// closeStage takes the ring from the peer. wr.op is held, or the endpoint is
// gone, and no other lock; nothing is staged any more.
func (s *Session) closeStage() {
	st := &s.tx.stage
	s.tx.mu.Lock()
	buf, d := st.buf, st.desc
	st.buf = nil
	s.tx.mu.Unlock()
	if buf != nil {
		s.ep.Revoke(d)
		s.ep.Free(buf)
	}
}

// idleStage has the ring given back in a while, if nothing is written until then.
func (s *Session) idleStage() {
	st := &s.tx.stage
	s.tx.mu.Lock()
	defer s.tx.mu.Unlock()
	if st.buf == nil || st.resting {
		return
	}
	st.resting = true
	at := st.tail
	time.AfterFunc(stageRest, func() {
		if !s.startWorker() {
			return
		}
		defer s.workers.Done()
		alone := s.wr.op.tryLock()
		s.tx.mu.Lock()
		st.resting = false
		rested := alone && st.tail == at && st.freed == at && !s.gone
		s.tx.mu.Unlock()
		if rested {
			s.closeStage()
		}
		if alone {
			s.wr.op.Unlock()
		}
	})
}

// The methods below want tx.mu held.

// staging says whether n bytes of a Write are to be staged: because they are
// enough, or because what is before them is.
func (tx *sender) staging(n int) bool {
	st := &tx.stage
	switch {
	case st.buf == nil:
		return false
	case st.unsent() > 0 || len(tx.opens) > 0:
		return true
	case n < tx.stageMin:
		return false
	case st.shy > 0:
		st.shy--
		return false
	}
	return true
}

// stageData takes bytes of p over, and sends what can be sent.
func (s *Session) stageData(p []byte, more bool) int {
	tx := &s.tx
	st := &tx.stage
	n := min(len(p), stageUnit)
	if room := st.room(); room < n {
		if room < len(st.buf)/4 && len(tx.opens) > 0 {
			return 0 // not in driblets
		}
		n = room
	}
	if n > 0 {
		s.fillStage(p[:n], more || n < len(p))
	}
	return n
}

func (s *Session) fillStage(p []byte, more bool) {
	tx := &s.tx
	st := &tx.stage
	at := int(st.tail % int64(len(st.buf)))
	copy(st.buf, p[copy(st.buf[at:], p):])
	st.tail += int64(len(p))
	tx.bytes += uint64(len(p))
	tx.inWrite = more
	s.flushStage()
	if st.unsent() > 0 {
		tx.waiting.Store(true)
	}
}

// flushStage offers what is staged; as payload goes what cannot be offered, or
// is too little for an offer and has none before it.
func (s *Session) flushStage() {
	tx := &s.tx
	st := &tx.stage
	for st.unsent() > 0 && s.streamFree() {
		at := int(st.sent % int64(len(st.buf)))
		n := min(st.unsent(), len(st.buf)-at)
		more := n < st.unsent() || tx.inWrite
		if len(tx.opens) == 0 && (st.payload || st.unsent() < tx.stageMin) {
			room := s.reserveData(min(n, minFragment), n)
			if room == nil {
				return
			}
			n = copy(room[headerLen:], st.buf[at:][:n])
			s.commit(room, msgData, moreFlag(more || n < st.unsent()), headerLen+n)
			st.sent += int64(n)
			st.freed = st.sent
		} else {
			if open := len(tx.opens); st.payload || open == maxOpen || open >= fewOpen && st.unsent() < len(st.buf)/pileShare {
				return
			}
			d := st.desc
			d.Len = uint64(at + n)
			o := openOffer{from: st.sent, to: st.sent + int64(n), total: n}
			if !s.sendReadOffer(o, d, at, nil, more) {
				return
			}
			st.sent = o.to
		}
	}
	if st.unsent() == 0 {
		st.payload = false
	}
}

// sendReadOffer opens an offer of a descriptor's bytes from an offset on.
func (s *Session) sendReadOffer(o openOffer, d Descriptor, offset int, first []byte, more bool) bool {
	tx := &s.tx
	n := offerReadLen + len(first)
	room := s.reservePayload(n-headerLen, n-headerLen)
	if room == nil {
		return false
	}
	o.id = tx.newID()
	le.PutUint32(room[headerLen:], o.id)
	le.PutUint32(room[headerLen+4:], uint32(offset))
	putDesc(room[headerLen+idLen:], d)
	copy(room[offerReadLen:], first)
	tx.opens = append(tx.opens, o)
	s.commit(room, msgOfferRead, moreFlag(more), n)
	return true
}

// streamFree: what has a place in the stream may be sent.
func (s *Session) streamFree() bool {
	return s.tx.withdrawing == 0 && s.tx.unanswered.Load() == 0
}

func (tx *sender) newID() uint32 {
	if tx.nextID++; tx.nextID == 0 {
		tx.nextID++
	}
	return tx.nextID
}

func (tx *sender) findOpen(id uint32) int {
	for i := range tx.opens {
		if tx.opens[i].id == id {
			return i
		}
	}
	return -1
}

// takeBack asks the peer to give an open offer up.
func (s *Session) takeBack(id uint32) {
	tx := &s.tx
	if tx.withdrawing == 0 && tx.findOpen(id) >= 0 {
		tx.withdrawing = id
		s.owe(control{t: msgCancelRead, id: id})
	}
}

// endedWhole: the peer has all of the open offers up to this one.
func (tx *sender) endedWhole(last int) {
	for i := range tx.opens[:last+1] {
		o := &tx.opens[i]
		if o.id == tx.withdrawing {
			tx.withdrawing = 0
		}
		if o.own {
			tx.out.taken, tx.out.over = o.total, true
		} else {
			tx.offers++
			tx.offerBytes += uint64(o.total)
		}
	}
	tx.opens = tx.opens[:copy(tx.opens, tx.opens[last+1:])]
	tx.freeStage()
}

// endedShort: the peer has but the first bytes of an open offer, and nothing of
// those behind it; void: not even the payload that came with it. They are to be
// sent again: by the Write that is inside, what is its own and what it has staged
// behind that; as payload, what was staged before.
func (tx *sender) endedShort(at, count int, void bool) {
	st := &tx.stage
	o := &tx.opens[at]
	st.sent = o.from
	if !o.own && !void {
		st.sent += int64(count)
		tx.offers++
		tx.offerBytes += uint64(count)
	}
	for i := range tx.opens[at:] {
		if v := &tx.opens[at+i]; v.own {
			tx.out.taken, tx.out.over = 0, true
			if tx.out.void = i > 0 || void; i == 0 {
				tx.out.taken = count
			}
			tx.bytes -= uint64(st.tail - v.to)
			st.tail = v.to
		}
	}
	st.sent = min(st.sent, st.tail)
	st.payload = st.unsent() > 0
	st.shy = shyness
	tx.opens = tx.opens[:at]
	tx.withdrawing = 0
	tx.freeStage()
}

func (tx *sender) freeStage() {
	tx.stage.freed = tx.stage.sent
	if len(tx.opens) > 0 {
		tx.stage.freed = tx.opens[0].from
	}
}
