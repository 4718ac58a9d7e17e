package session

import (
	"slices"

	"github.com/sanconn/san/session/internal/credit"
	"github.com/sanconn/san/session/internal/wire"
)

// sender is this end's direction of the stream: what has to be sent, in its order, and what there is
// room for. It sends itself what can be sent now, and neither locks nor waits. Session.txMu guards it
// and the endpoint's sending methods, and is held when a method is called. What is due afterwards is in
// do; see Session.unlockTx.
type sender struct {
	msgs    Messages
	mem     Memory
	credits *credit.Counts
	terms   *terms

	closed  bool         // the endpoint is closed, or about to be
	control controlQueue // control messages for which there was no room or credit
	last    lastMessage
	abrupt  bool // until last is sent, the stream counts as cut: see Session.ResetAtDeath
	cutDue  bool // … and the peer was not told that yet
	stalled bool // data found no credit at the last attempt
	urgent  bool // urgent data has used the control reserve since data last had room

	reserved        []byte // room that the application fills: of a message, or of the send buffer
	reservedMessage []byte // … with its header, if it is of a message; else nil

	buffer  sendBuffer
	offer   outOffer
	do      due // wake is for a Write
	stats   traffic
	carried uint64 // messages other than control: see core.peerProgress
}

// lastMessage ends the stream, after all bytes.
type lastMessage struct {
	typ  wire.Type // Shutdown, Close or Abort; 0: none yet
	sent bool
}

func (l lastMessage) waits() bool { return l.typ != 0 && !l.sent }

// closes reports whether this end does not read any more either.
func (l lastMessage) closes() bool { return l.typ == wire.TypeClose || l.typ == wire.TypeAbort }

// minFragment is the least room in bytes that a longer Write accepts: a ring skips a shorter rest at
// its end.
const minFragment = 2 << 10

// controlMost bounds waiting control messages. A peer that keeps to the protocol causes no more (see
// docs/PROTOCOL.md, Credits).
const controlMost = 2 * ControlReserve

// controlQueue has the waiting control messages, in their order.
type controlQueue struct {
	list   []wire.Control // at most controlMost
	credit bool           // a Credit message, after list
}

// find returns the oldest message of a type, or nil.
func (o *controlQueue) find(t wire.Type) *wire.Control {
	for i := range o.list {
		if o.list[i].Type() == t {
			return &o.list[i]
		}
	}
	return nil
}

// replace puts c in the place of a waiting message of its type, if only the last one counts.
func (o *controlQueue) replace(c *wire.Control) bool {
	typ := c.Type()
	old := o.find(typ)
	if old == nil || typ != wire.TypeEmptied && typ != wire.TypeNearDone {
		return false
	}
	*old = *c
	return true
}

// credit returns how many more messages may be sent.
func (t *sender) credit() int {
	left, err := t.credits.Available()
	if err != nil {
		t.do.violation("%w", err)
	}
	if t.reservedMessage != nil {
		left-- // for the message that the application fills
	}
	return left
}

// pending reports whether something waits for room or credit.
func (t *sender) pending() bool {
	return len(t.control.list) > 0 || t.control.credit || t.buffer.unsent() > 0 || t.last.waits() || t.cutWaits()
}

// cutWaits reports whether the peer has to be told that the stream is cut here; not before Negotiate,
// nor after the last message.
func (t *sender) cutWaits() bool { return t.cutDue && t.terms.maxMsg > 0 && t.writable() }

// writable reports whether bytes can still be written.
func (t *sender) writable() bool { return !t.closed && t.last.typ == 0 }

// mayWrite reports whether bytes may be written now, after what waits, which it sends as far as there
// is room.
func (t *sender) mayWrite() bool {
	if !t.writable() || t.reserved != nil {
		return false
	}
	if t.pending() {
		t.flush()
	}
	return true
}

// trySend takes bytes from the front of p, into a message or into the send buffer. It returns how many;
// 0: there is no room now.
func (t *sender) trySend(p []byte, more bool) int {
	if !t.mayWrite() {
		return 0
	}
	// No byte of the send buffer precedes them, and it is not open, or not for so few.
	if o := &t.buffer; o.unsent() == 0 && !(o.state == bufferOpen && len(p) >= t.terms.bufferFrom) {
		if n := t.tryMessage(p, min(len(p), minFragment), more); n > 0 {
			return n
		}
	}
	return t.intoBuffer(p, more)
}

// tryMessage sends bytes from the front of p, least or more, in one message. It returns how many; 0:
// there is no room now.
func (t *sender) tryMessage(p []byte, least int, more bool) int {
	room := t.room(least, len(p))
	if room == nil {
		return 0
	}
	n := copy(room[wire.HeaderLen:], p)
	t.commitMessage(room, wire.TypeData, wire.More(more || n < len(p)), wire.HeaderLen+n)
	t.stats.bytes += uint64(n)
	return n
}

// tryWhole takes all of p, of at most terms.whole bytes, if that is possible at once: into a message
// or, after what is in the send buffer, into the send buffer.
func (t *sender) tryWhole(p []byte) bool {
	switch {
	case !t.mayWrite():
		return false
	case t.buffer.unsent() > 0:
		return t.buffer.unused() >= len(p) && t.intoBuffer(p, false) > 0 // there is room, so it takes all
	}
	return t.tryMessage(p, len(p), false) > 0
}

// intoBuffer copies bytes from the front of p into the send buffer, and returns how many.
func (t *sender) intoBuffer(p []byte, more bool) int {
	n := t.buffer.copyIn(p, more)
	if n > 0 {
		t.stats.bytes += uint64(n)
		t.drainBuffer()
	}
	return n
}

// tryPacked sends all of v in one message, or nothing, and returns how many bytes it has sent.
func (t *sender) tryPacked(v [][]byte, more bool) int {
	sum := 0
	for _, b := range v {
		sum += len(b)
	}
	if sum == 0 || !t.mayWrite() || t.buffer.unsent() > 0 {
		return 0
	}
	room := t.room(sum, sum)
	if room == nil {
		return 0
	}
	at := wire.HeaderLen
	for _, b := range v {
		at += copy(room[at:], b)
	}
	t.commitMessage(room, wire.TypeData, wire.More(more), at)
	t.stats.bytes += uint64(sum)
	return sum
}

// room reserves a message with a place in the stream: lo to hi bytes after its header.
func (t *sender) room(lo, hi int) []byte {
	if t.control.find(wire.TypeNote) != nil { // it precedes the rest of the stream
		return nil
	}
	if t.credit() <= credit.Control {
		if !t.stalled {
			t.stats.stalls++
		}
		t.stalled = true
		t.buffer.without = max(t.buffer.without, t.terms.bufferAfter)
		return nil
	}
	t.stalled = false
	room := t.msgs.Reserve(min(lo+wire.HeaderLen, t.terms.maxMsg), min(hi+wire.HeaderLen, t.terms.maxMsg))
	if room != nil {
		t.urgent = false
	}
	return room
}

// commitMessage writes the header and sends the first n bytes of room.
func (t *sender) commitMessage(room []byte, typ wire.Type, flags uint8, n int) {
	if t.abrupt && typ != wire.TypeUrgent {
		flags |= wire.FlagMore
		t.cutDue = false
	}
	wire.Header{Type: typ, Flags: flags, Credit: t.credits.Advertise()}.Put(room)
	t.msgs.Commit(n)
	t.credits.Sent()
	t.credits.Mark()
	t.stats.messages++
	t.carried++
}

// send sends a control message if there is room and credit.
func (t *sender) send(c *wire.Control) bool {
	if c.Type() != wire.TypeCredit && t.credit() < 1 {
		return false
	}
	room := t.msgs.ReserveControl(c.Len())
	if room == nil {
		return false
	}
	c.Put(room, t.credits.Advertise())
	if c.Returns.Returnable {
		t.mem.CommitReturn(c.Len(), c.Returns)
	} else {
		t.msgs.CommitControl(c.Len())
	}
	if c.Type() != wire.TypeCredit {
		t.credits.Sent()
	}
	t.stats.messages++
	return true
}

// queueControl sends a control message, now or as soon as there is room.
func (t *sender) queueControl(c wire.Control) {
	switch {
	case t.closed, len(t.control.list) == 0 && t.send(&c):
	case t.control.replace(&c):
	case len(t.control.list) == controlMost:
		t.do.violation("it causes more control messages than it takes")
	default:
		t.control.list = append(t.control.list, c)
	}
}

// flush sends what waits.
func (t *sender) flush() {
	if t.closed {
		return
	}
	sent := 0
	for sent < len(t.control.list) && t.send(&t.control.list[sent]) {
		sent++
	}
	t.control.list = slices.Delete(t.control.list, 0, sent)
	t.drainBuffer()
	if t.cutWaits() && t.reserved == nil { // on a ring, so there is no send buffer
		if room := t.room(0, 0); room != nil {
			t.commitMessage(room, wire.TypeData, wire.FlagMore, wire.HeaderLen)
		}
	}
	if t.last.waits() && len(t.control.list) == 0 && t.buffer.unsent() == 0 {
		c := wire.Plain(t.last.typ)
		t.last.sent = t.send(&c)
	}
	c := wire.Plain(wire.TypeCredit)
	t.control.credit = t.credits.Due() && !t.send(&c)
}

// finish queues the last message, after all that was written.
func (t *sender) finish(last wire.Type) {
	if t.last.typ != last {
		t.last = lastMessage{typ: last}
	}
	t.flush()
}

// urgentMessage sends urgent data: in data's room or, once while data is blocked, in the room that is
// reserved for control.
func (t *sender) urgentMessage(p []byte) bool {
	if !t.writable() {
		return false
	}
	if t.reservedMessage == nil {
		if room := t.room(len(p), len(p)); room != nil {
			n := wire.HeaderLen + copy(room[wire.HeaderLen:], p)
			t.commitMessage(room, wire.TypeUrgent, 0, n)
			return true
		}
	}
	if t.urgent {
		return false
	}
	c := wire.Bytes(wire.TypeUrgent, p)
	t.urgent = t.send(&c)
	return t.urgent
}

// reserveRoom reserves at most most bytes for the application to fill, or returns nil if there is no
// room now.
func (t *sender) reserveRoom(most int) []byte {
	if !t.mayWrite() {
		return nil
	}
	switch {
	case t.buffer.state == bufferOpen:
		t.reserved = t.buffer.contiguousRoom(most)
	case t.buffer.unsent() == 0:
		if room := t.room(min(most, minFragment), most); room != nil {
			t.reserved, t.reservedMessage = room[wire.HeaderLen:], room
		}
	}
	return t.reserved
}

// endLoan ends the loan: its first n bytes take their place in the stream, unless the stream has ended
// meanwhile.
func (t *sender) endLoan(n int) (ok bool) {
	reserved, room := t.reserved, t.reservedMessage
	t.reserved, t.reservedMessage = nil, nil
	t.do.wake = true
	if ok = t.writable(); !ok {
		n = 0
	}
	t.stats.loanBytes += uint64(n)
	switch {
	case room != nil && n > 0:
		t.commitMessage(room, wire.TypeData, 0, wire.HeaderLen+n)
		t.stats.bytes += uint64(n)
	case room != nil && !t.closed:
		t.msgs.Commit(0)
	case n > 0 && n <= t.terms.whole && t.buffer.unsent() == 0 && t.tryMessage(reserved[:n], n, false) > 0:
	case n > 0: // no RDMA write precedes it
		t.buffer.tail += int64(n)
		t.buffer.inWrite = false
		t.stats.bytes += uint64(n)
	}
	t.flush()
	return ok
}
