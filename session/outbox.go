package session

import "time"

// Sending through the peer's inbox, so that a Write of moderate size need not wait
// until the peer has its bytes (D8). They are copied to the outbox, a ring of the
// provider's memory at this end; an RDMA write takes them to the peer's inbox
// (inbox.go), another ring, and the Fill after it announces them. Their place in the
// stream is that of the Fill.

// outbox is guarded by tx.mu; buf changes under wr.op too. Positions count bytes
// since the inbox was opened.
type outbox struct {
	buf   []byte     // nil: closed
	inbox Descriptor // the peer's; Len 0: none
	asked bool       // the peer was asked for one and has not answered
	skip  int        // Writes until the peer is asked again, after memory was short

	emptied int64 // up to here the peer has read
	written int64 // … the RDMA writes have completed: the room here is free again
	sent    int64 // … they were started, and announced by Fill
	tail    int64 // … it is filled here

	full    bool // a Write waits until a good part of it is free
	useless bool // its memory cannot be registered: what it holds goes as payload
	resting bool // the timer for leaveIfIdle runs
}

const (
	// At a time as many bytes are copied and then sent as are on their way, but at
	// least boxUnit, and at most boxMost or half of what is left of the Write: so
	// something is on its way while the last part is copied. Half of boxUnit costs a
	// seventh of the rate of larger Writes on rxe; boxMost gains a twentieth on siw,
	// twice boxMost no more.
	boxUnit = 128 << 10
	boxMost = 512 << 10
	// 1/boxShareFree of a full outbox has to be free before a Write goes on: waking it
	// for a few bytes costs more than sending them.
	boxShareFree = 4
	// skipShort is how many Writes do without an outbox after memory ran out here or at
	// the peer; skipLong after it could not be registered, as each attempt costs the
	// process all its idle registrations.
	skipShort = 32
	skipLong  = 1024
	// boxRest is the time between checks for use: idle boxes are kept for one to two
	// seconds.
	boxRest = time.Second
)

func (o *outbox) unsent() int { return int(o.tail - o.sent) }

func (o *outbox) room() int { return len(o.buf) - int(o.tail-o.written) }

// openOutbox asks the peer for an inbox if there is none, and allocates the outbox once
// there is one. It gives a useless outbox back. wr.op is held.
func (s *Session) openOutbox() {
	tx := &s.tx
	o := &tx.outbox
	tx.mu.Lock()
	if o.useless && o.tail == o.written && !s.gone {
		buf := o.buf
		s.leaveInbox()
		tx.mu.Unlock()
		s.mem.Free(buf)
		return
	}
	if o.inbox.Len == 0 && !o.asked && !s.gone {
		if o.skip > 0 {
			o.skip--
		} else {
			o.asked = true
			s.owe(control{t: msgAskInbox})
		}
	}
	try := o.buf == nil && o.inbox.Len > 0 && !s.gone
	tx.mu.Unlock()
	if !try {
		return
	}
	buf := s.allocBox(s.cfg.SendBudget)
	tx.mu.Lock()
	defer tx.mu.Unlock()
	if buf == nil {
		s.leaveInbox()
		o.skip = skipShort
		return
	}
	o.buf = buf
}

// allocBox allocates memory for an inbox or outbox, less where it is short; nil: too
// little to be of use.
func (s *Session) allocBox(budget int) []byte {
	size := min(budget, s.lim.MaxExpose/boxShare, maxBox)
	if size < max(s.lim.Inbox, minFragment) {
		return nil
	}
	buf := s.mem.Alloc(size)
	for buf == nil && size > boxUnit {
		size /= 2
		buf = s.mem.Alloc(size)
	}
	return buf
}

// leaveIfIdle gives the boxes back if nothing was written since position at, and
// otherwise checks again after boxRest.
func (s *Session) leaveIfIdle(at int64) {
	if !s.startWorker() {
		return
	}
	defer s.workers.Done()
	o := &s.tx.outbox
	alone := s.wr.op.tryLock()
	s.tx.mu.Lock()
	o.resting = false
	var buf []byte
	if alone && o.inbox.Len > 0 && o.tail == at && o.written == at && !s.gone {
		buf = o.buf
		s.leaveInbox()
	}
	s.restOutbox()
	s.tx.mu.Unlock()
	s.leftBehind()
	if buf != nil {
		s.mem.Free(buf)
	}
	if alone {
		s.wr.op.Unlock()
	}
}

// freeOutbox gives the memory back, after the endpoint and all operations have ended.
func (s *Session) freeOutbox() {
	if buf := s.tx.outbox.buf; buf != nil {
		s.tx.outbox.buf = nil
		s.mem.Free(buf)
	}
}

// The methods below want tx.mu held.

// restOutbox starts the timer that gives the boxes back once they are idle.
func (s *Session) restOutbox() {
	o := &s.tx.outbox
	if o.inbox.Len > 0 && !o.resting && !s.gone {
		o.resting = true
		at := o.tail
		time.AfterFunc(boxRest, func() { s.leaveIfIdle(at) })
	}
}

// leaveInbox tells the peer that nothing more comes through its inbox.
func (s *Session) leaveInbox() {
	o := &s.tx.outbox
	skip := 0
	if o.useless {
		skip = skipLong
	}
	*o = outbox{resting: o.resting, skip: skip}
	s.owe(control{t: msgLeaveInbox})
}

// inboxOfPeer handles the peer's answer to AskInbox; a length of 0: it has no memory.
func (s *Session) inboxOfPeer(d Descriptor) {
	o := &s.tx.outbox
	if !o.asked || d.Len > maxBox {
		s.violation("an inbox of %d bytes that was not asked for", d.Len)
		return
	}
	if o.asked, o.inbox = false, d; d.Len == 0 {
		o.skip = skipShort
	}
	s.restOutbox()
}

// emptiedByPeer handles Emptied: the peer has read its inbox up to upTo.
func (s *Session) emptiedByPeer(upTo uint64) {
	o := &s.tx.outbox
	if o.inbox.Len == 0 {
		return // it crossed our LeaveInbox
	}
	if upTo > uint64(o.sent) || int64(upTo) < o.emptied {
		s.violation("it has read %d bytes of %d in its inbox, and before that %d", upTo, o.sent, o.emptied)
		return
	}
	o.emptied = int64(upTo)
	s.flushLocked()
}

// boxed counts n bytes of the outbox as written to the peer's inbox.
func (s *Session) boxed(n int) {
	o := &s.tx.outbox
	o.written += int64(n)
	if o.unsent() > 0 {
		s.flushLocked()
	}
	s.boxHasRoom()
}

// boxHasRoom wakes a waiting Write if there is enough room.
func (s *Session) boxHasRoom() {
	if o := &s.tx.outbox; s.wr.wants.Load() != 0 && o.room() >= len(o.buf)/boxShareFree {
		s.wr.signal()
	}
}

// boxing reports whether n bytes of a Write go through the outbox: because they are
// enough, or because bytes before them are still there.
func (tx *sender) boxing(n int) bool {
	o := &tx.outbox
	return o.buf != nil && !o.useless && (n >= tx.boxMin || o.unsent() > 0)
}

// boxData copies bytes of p to the outbox, and sends what can be sent.
func (s *Session) boxData(p []byte, more bool) int {
	tx := &s.tx
	o := &tx.outbox
	n := min(len(p), max(boxUnit, min(boxMost, int(o.sent-o.written), len(p)/2)))
	if room := o.room(); room < n || o.full {
		if o.full = room < len(o.buf)/boxShareFree; o.full {
			return 0
		}
		n = min(n, room)
	}
	at := int(o.tail % int64(len(o.buf)))
	copy(o.buf, p[copy(o.buf[at:], p[:n]):n])
	o.tail += int64(n)
	tx.bytes += uint64(n)
	tx.inWrite = more || n < len(p)
	s.flushOutbox()
	if o.unsent() > 0 {
		tx.waiting.Store(true)
	}
	return n
}

// flushOutbox sends what the outbox has, as far as there is room in the peer's
// inbox, in the queue, and credit.
func (s *Session) flushOutbox() {
	tx := &s.tx
	o := &tx.outbox
	for o.unsent() > 0 {
		if o.useless {
			if !s.unbox() {
				return
			}
			continue
		}
		from, to := int(o.sent%int64(len(o.buf))), int(o.sent%int64(o.inbox.Len))
		n := min(o.unsent(), len(o.buf)-from, int(o.inbox.Len)-to, int(o.inbox.Len)-int(o.sent-o.emptied), s.lim.MaxRDMA)
		if n == 0 {
			return
		}
		room := s.reserveData(fillLen-headerLen, fillLen-headerLen)
		if room == nil {
			return
		}
		if err := s.mem.Write(o.buf[from:][:n], o.inbox, to, boxID); err == ErrWouldBlock {
			s.ep.Commit(0)
			return
		} else if err != nil {
			s.ep.Commit(0)
			o.useless = true // it may have been unregistered for others; until the boxes are given back
			continue
		}
		tx.writes.push(n)
		o.sent += int64(n)
		tx.offerBytes += uint64(n)
		le.PutUint32(room[headerLen:], uint32(n))
		le.PutUint32(room[headerLen+4:], 0)
		s.commit(room, msgFill, moreFlag(o.unsent() > 0 || tx.inWrite), fillLen)
	}
}

// unbox sends a message of what the outbox holds as payload, once nothing of it is on
// its way by RDMA, as the ring's room becomes free in order.
func (s *Session) unbox() bool {
	tx := &s.tx
	o := &tx.outbox
	if o.sent != o.written {
		return false
	}
	from := int(o.sent % int64(len(o.buf)))
	n := min(o.unsent(), len(o.buf)-from)
	room := s.reserveData(min(n, minFragment), n)
	if room == nil {
		return false
	}
	n = copy(room[headerLen:], o.buf[from:][:n])
	o.sent += int64(n)
	o.written = o.sent
	s.commit(room, msgData, moreFlag(o.unsent() > 0 || tx.inWrite), headerLen+n)
	s.boxHasRoom()
	return true
}

// boxID is the id of RDMA writes to the peer's inbox; no offer has it.
const boxID = 0
