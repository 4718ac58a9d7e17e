package session

import (
	"sync"
	"sync/atomic"
	"syscall"
)

// sender holds what goes to the peer.
type sender struct {
	mu sync.Mutex // guards all below and the endpoint's sending methods

	sent   uint32 // messages, modulo 2³²
	maxMsg int    // set by Negotiate, as are the next three
	// threshold is the smallest Write whose bytes are offered, 0: none are;
	// byRead says how.
	threshold int
	byRead    bool
	boxMin    int // the smallest Write that goes through the outbox, 0: none does

	owed        [owedMax]control // control messages that found no room or credit
	nOwed       int
	backlog     []byte      // data that Write took over while there was no credit
	backlogSent int         // bytes of backlog that were sent
	inWrite     bool        // a Write goes on after the end of the backlog or outbox
	last        msgType     // Shutdown, Close or Abort, to be sent after the backlog; 0: none yet
	lastOut     bool        // last was sent
	stalled     bool        // data found no credit at its last attempt
	urgent      bool        // urgent data has used the control reserve since data last had room
	waiting     atomic.Bool // pending, or Credit due: for those who do not hold mu

	out    outOffer
	outbox outbox
	writes queue[int] // lengths of RDMA writes under way
	nextID uint32

	bytes, messages, offers, offerBytes, stalls uint64
}

const (
	// minFragment is the least room in bytes that a longer Write accepts: a
	// ring skips a shorter rest at its end.
	minFragment = 2 << 10
	// owedMax is enough: a peer that keeps to the protocol causes no more (see
	// docs/PROTOCOL.md, Credits).
	owedMax = 2 * ControlReserve
)

// control is a message without payload.
type control struct {
	t     msgType
	flags byte
	id    uint32
	desc  Descriptor // Grant, Inbox; count in Addr for the Dones and Emptied
}

func (c *control) size() int {
	switch c.t {
	case msgGrant, msgInbox:
		return headerLen + idLen + descLen
	case msgReadDone, msgWriteDone, msgEmptied:
		return headerLen + idLen + 8
	case msgCancelRead, msgCancelWrite, msgRefuse:
		return headerLen + idLen
	}
	return headerLen
}

// Write writes all of p, or returns how many bytes were taken and why not more.
// Once it has returned, the session or the peer has the bytes and p is no longer
// touched. Errors: ErrClosed, ErrInterrupted, syscall.EPIPE (the peer no longer
// reads), ECONNRESET, ETIMEDOUT, ENOBUFS (D9).
func (s *Session) Write(p []byte) (int, error) {
	s.writesBeside()
	if n := len(p); n <= minFragment && n > 0 && s.writeAtOnce(p) {
		return n, nil
	}
	s.wr.op.Lock()
	n, err := s.write(p, false)
	s.leftBehind()
	s.wr.op.Unlock()
	return n, err
}

// writeAtOnce is Write for a small p when nothing stands in its way. It needs only
// tx.mu, as there is no other Write in progress to wait for.
func (s *Session) writeAtOnce(p []byte) bool {
	tx := &s.tx
	tx.mu.Lock()
	var room []byte
	if !s.wr.op.held() && s.wr.state.Load() == 0 && !s.idle.away.Load() &&
		(tx.threshold == 0 || len(p) < tx.threshold) && headerLen+len(p) <= tx.maxMsg &&
		!s.gone && s.failure.Load() == nil && tx.last == 0 && !tx.pending() {
		room = s.reserveData(len(p), len(p))
	}
	if room != nil {
		copy(room[headerLen:], p)
		s.commit(room, msgData, 0, headerLen+len(p))
		tx.bytes += uint64(len(p))
	}
	tx.mu.Unlock()
	return room != nil
}

// WriteBuffers writes the slices in order, as one Write, packing small ones into
// one message. It does not change v.
func (s *Session) WriteBuffers(v [][]byte) (n int64, err error) {
	s.writesBeside()
	for len(v) > 0 && len(v[len(v)-1]) == 0 {
		v = v[:len(v)-1] // so that the last slice ends the Write
	}
	s.wr.op.Lock()
	defer s.wr.op.Unlock()
	defer s.leftBehind()
	if len(v) == 0 {
		_, err = s.write(nil, false)
	}
	for len(v) > 0 && err == nil {
		var k int
		if pack := s.packable(v); pack > 1 {
			if k = s.sendPacked(v[:pack], pack < len(v)); k > 0 {
				n += int64(k)
				v = v[pack:]
				continue
			}
		}
		k, err = s.write(v[0], len(v) > 1)
		n += int64(k)
		v = v[1:]
	}
	return n, err
}

// packable is how many slices from the front fit into one message of moderate size.
func (s *Session) packable(v [][]byte) int {
	const packLimit = 16 << 10 // above, a message's own cost is small compared with the copy
	limit, sum := min(packLimit, s.tx.maxMsg-headerLen), 0
	if s.cfg.Disable&FeatureInline != 0 && s.tx.threshold > 0 {
		return 0
	}
	for i, b := range v {
		if sum += len(b); sum > limit {
			return i
		}
	}
	return len(v)
}

// write is Write, for the holder of wr.op; more: the Write goes on after p.
func (s *Session) write(p []byte, more bool) (n int, err error) {
	if st := s.wr.state.Load(); st != 0 {
		return 0, s.writeState(st)
	}
	if s.idle.away.Load() {
		s.idle.join(s)
	}
	if t := s.tx.threshold; t > 0 && len(p) >= t {
		return s.writeOffered(p, more)
	}
	if m := s.tx.boxMin; m > 0 && len(p) >= m {
		s.openOutbox()
	}
	n = s.sendData(p, more)
	if n == len(p) {
		return n, nil
	}
	return s.writeInline(p, n, more)
}

// writeInline sends p[n:] as payload, waiting for room.
func (s *Session) writeInline(p []byte, n int, more bool) (int, error) {
	var w waiter
	defer s.doneWaiting(&w, &s.wr)
	for n < len(p) {
		if st := s.wr.state.Load(); st != 0 {
			return n, s.writeState(st)
		}
		if k := s.sendData(p[n:], more); k > 0 {
			n += k
			w.progress(&s.wr)
			continue
		}
		if err := s.writeBlocked(); err != nil {
			return n, err
		}
		s.waitWrite(&w)
	}
	return n, nil
}

// waitWrite is pause for Write, which also handles what comes from the peer while it
// waits, unless a Read does.
func (s *Session) waitWrite(w *waiter) {
	ev := SendReady | RecvReady
	if s.rd.op.held() {
		if s.lim.Ring() && !s.tx.out.active { // active: written by Writes alone
			ev = SendReady
		}
		if w.armed() {
			s.poke(true)
		}
	} else {
		s.poke(w.armed())
	}
	s.pause(w, &s.wr, ev)
}

// writeBlocked says why a Write that got no further must not go on. It reads the reason
// for the connection's end before the state: a Close or Abort of this end sets the state
// before it ends the connection, and takes precedence.
func (s *Session) writeBlocked() error {
	err := s.over()
	if st := s.wr.state.Load(); st != 0 {
		return s.writeState(st)
	}
	return err
}

func (s *Session) writeState(st uint32) error {
	switch {
	case st&stClosed != 0:
		return ErrClosed
	case st&stInterrupted != 0:
		return ErrInterrupted
	case st&stShut != 0:
		return ErrClosed
	}
	return syscall.EPIPE
}

// sendData sends one message of p's bytes, or takes them into the backlog, and
// returns how many it took; 0: would block.
func (s *Session) sendData(p []byte, more bool) (n int) {
	tx := &s.tx
	tx.mu.Lock()
	defer tx.mu.Unlock()
	if s.gone || s.failure.Load() != nil || tx.last != 0 || len(p) == 0 || !s.lim.Ring() && s.ep.Err() != nil {
		return 0 // not into the backlog of a connection that has ended
	}
	if tx.pending() {
		s.flushLocked()
	}
	o := &tx.outbox
	if o.useless && o.unsent() > 0 {
		return 0 // nothing follows until it is empty and given back
	}
	if tx.backlogged() == 0 && tx.boxing(len(p)) {
		return s.boxData(p, more)
	}
	if tx.backlogged() == 0 {
		if room := s.reserveData(min(len(p), minFragment), len(p)); room != nil {
			n = copy(room[headerLen:], p)
			s.commit(room, msgData, moreFlag(more || n < len(p)), headerLen+n)
			tx.bytes += uint64(n)
			return n
		}
	}
	if s.lim.Ring() {
		return 0
	}
	// No credit or room: take over what the budget allows (D8). What piles up here
	// leaves in full messages, which is all the coalescing there is.
	if o.buf != nil {
		if tx.backlogged() > 0 || o.useless {
			return 0 // let the backlog from before the outbox drain
		}
		return s.boxData(p, more)
	}
	n = min(len(p), min(s.cfg.SendBudget, maxBacklog)-tx.backlogged())
	if n <= 0 {
		return 0
	}
	if tx.backlogSent > 0 && len(tx.backlog)+n > cap(tx.backlog) {
		tx.backlog = tx.backlog[:copy(tx.backlog, tx.backlog[tx.backlogSent:])]
		tx.backlogSent = 0
	}
	tx.backlog = append(tx.backlog, p[:n]...)
	tx.inWrite = more || n < len(p)
	tx.waiting.Store(true)
	tx.bytes += uint64(n)
	return n
}

// sendPacked sends all of v in one message, or nothing, and returns the bytes sent.
func (s *Session) sendPacked(v [][]byte, more bool) int {
	tx := &s.tx
	sum := 0
	for _, b := range v {
		sum += len(b)
	}
	if sum == 0 || s.wr.state.Load() != 0 {
		return 0
	}
	tx.mu.Lock()
	defer tx.mu.Unlock()
	if s.gone || s.failure.Load() != nil || tx.last != 0 {
		return 0
	}
	if tx.pending() {
		s.flushLocked()
	}
	if tx.backlogged() > 0 || tx.outbox.unsent() > 0 {
		return 0
	}
	room := s.reserveData(sum, sum)
	if room == nil {
		return 0
	}
	at := headerLen
	for _, b := range v {
		at += copy(room[at:], b)
	}
	s.commit(room, msgData, moreFlag(more), at)
	tx.bytes += uint64(sum)
	return sum
}

func moreFlag(more bool) byte {
	if more {
		return flagMore
	}
	return 0
}

// The methods below want tx.mu held.

func (tx *sender) backlogged() int { return len(tx.backlog) - tx.backlogSent }

// pending reports whether something waits for room or credit.
func (tx *sender) pending() bool {
	return tx.nOwed > 0 || len(tx.backlog) > 0 || tx.outbox.unsent() > 0 || tx.last != 0 && !tx.lastOut
}

// reserveData reserves room, and checks the credit, for a message with a place in the
// stream.
func (s *Session) reserveData(lo, hi int) []byte {
	if !s.streamFree() {
		return nil
	}
	return s.reservePayload(lo, hi)
}

// streamFree reports whether messages with a place in the stream may be sent.
func (s *Session) streamFree() bool {
	tx := &s.tx
	for i := range tx.owed[:tx.nOwed] { // the end of an offer goes before what follows it
		if o := &tx.owed[i]; o.t == msgWriteDone && o.flags&flagLast != 0 {
			return false
		}
	}
	return true
}

func (s *Session) reservePayload(lo, hi int) []byte {
	tx := &s.tx
	if s.credit() <= ControlReserve {
		if !tx.stalled {
			tx.stalls++
		}
		tx.stalled = true
		return nil
	}
	tx.stalled = false
	limit := tx.maxMsg
	room := s.ep.Reserve(min(lo+headerLen, limit), min(hi+headerLen, limit))
	if room == nil {
		return nil
	}
	tx.urgent = false
	return room
}

// commit writes the header and sends the first n bytes of room.
func (s *Session) commit(room []byte, t msgType, flags byte, n int) {
	s.header(room, t, flags)
	s.ep.Commit(n)
}

// header writes the header of a message that is about to be committed.
func (s *Session) header(room []byte, t msgType, flags byte) {
	f := uint32(0)
	if s.lim.Window != 0 {
		f = s.credits.freed.Load()
		s.credits.advertised.Store(f)
	}
	putHeader(room, t, flags, f)
	if t != msgCredit {
		s.tx.sent++
	}
	s.tx.messages++
}

// trySend sends a control message if there is room and credit.
func (s *Session) trySend(c *control) bool {
	if c.t != msgCredit && s.credit() < 1 {
		return false
	}
	n := c.size()
	room := s.ep.ReserveControl(n)
	if room == nil {
		return false
	}
	if n > headerLen {
		b := room[headerLen:]
		le.PutUint64(b, uint64(c.id))
		switch c.t {
		case msgGrant, msgInbox:
			putDesc(b[idLen:], c.desc)
		case msgReadDone, msgWriteDone, msgEmptied:
			le.PutUint64(b[idLen:], c.desc.Addr)
		}
	}
	s.header(room, c.t, c.flags)
	s.ep.CommitControl(n)
	return true
}

// sendControl sends a control message, now or as soon as there is room. It may
// be called with rx.mu held.
func (s *Session) sendControl(c control) {
	s.tx.mu.Lock()
	s.owe(c)
	s.tx.mu.Unlock()
}

// owe is sendControl for the holder of tx.mu.
func (s *Session) owe(c control) {
	tx := &s.tx
	if s.gone {
		return
	}
	if tx.nOwed == 0 && s.trySend(&c) {
		return
	}
	if c.t == msgEmptied {
		for i := range tx.owed[:tx.nOwed] { // a later Emptied replaces it
			if o := &tx.owed[i]; o.t == msgEmptied {
				*o = c
				return
			}
		}
	}
	if tx.nOwed == len(tx.owed) {
		s.violation("it causes more control messages than it takes")
		return
	}
	tx.owed[tx.nOwed] = c
	tx.nOwed++
	tx.waiting.Store(true)
}

// flush sends what waits. It may be called with rx.mu held.
func (s *Session) flush() {
	tx := &s.tx
	tx.mu.Lock()
	if !s.gone {
		s.flushLocked()
	}
	tx.mu.Unlock()
}

func (s *Session) flushLocked() {
	tx := &s.tx
	sent := 0
	for sent < tx.nOwed && s.trySend(&tx.owed[sent]) {
		sent++
	}
	if sent > 0 {
		tx.nOwed = copy(tx.owed[:], tx.owed[sent:tx.nOwed])
	}
	for tx.backlogged() > 0 {
		rest := tx.backlog[tx.backlogSent:]
		room := s.reserveData(min(len(rest), minFragment), len(rest))
		if room == nil {
			break
		}
		n := copy(room[headerLen:], rest)
		s.commit(room, msgData, moreFlag(n < len(rest) || tx.inWrite), headerLen+n)
		tx.backlogSent += n
	}
	if tx.backlogSent == len(tx.backlog) {
		tx.backlog, tx.backlogSent = tx.backlog[:0], 0
		if cap(tx.backlog) > keepBacklog {
			tx.backlog = nil
		}
		s.flushOutbox()
		if tx.last != 0 && !tx.lastOut && tx.nOwed == 0 && tx.outbox.unsent() == 0 && s.streamFree() {
			tx.lastOut = s.trySend(&control{t: tx.last})
		}
	}
	unsaid := s.creditDue() && !s.trySend(&control{t: msgCredit})
	tx.waiting.Store(tx.pending() || unsaid)
}

const (
	// maxBacklog is the largest backlog in bytes: it lies on Go's heap.
	maxBacklog = 256 << 10
	// keepBacklog is how much idle backlog memory in bytes it may keep.
	keepBacklog = 16 << 10
)
