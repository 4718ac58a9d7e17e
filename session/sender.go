package session

import (
	"errors"
	"sync/atomic"

	"github.com/sanconn/san/session/internal/credit"
	"github.com/sanconn/san/session/internal/wire"
)

// sender is this end's direction of the stream: what has to be sent, in its order, and
// what there is room for. It sends by itself what can be sent now, and neither locks nor
// waits: Session.txMu guards it and the endpoint's sending methods, and is held when a
// method is called. wake and fault are what is to be done then; see Session.unlockTx.
type sender struct {
	msgs    Messages
	mem     Memory
	credits *credit.Counts
	maxRDMA int // bytes
	maxMsg  int // set by Negotiate, as are the next four fields

	threshold int  // the smallest Write whose memory is offered, 0: none is
	boxMayPay bool // … but for those that had better go through the box: Memory.Pays
	boxFrom   int  // the smallest Write that goes through the box, 0: none does
	boxAfter  int  // bytes of them until an inbox is asked for

	gone    bool         // the endpoint is closed, or being closed
	owed    owedMessages // control messages that found no room or credit
	inWrite bool         // a Write goes on after the end of the box
	abrupt  bool         // until last is sent, the stream counts as cut: see Session.ResetAtDeath
	last    wire.Type    // Shutdown, Close or Abort, to be sent behind all bytes; 0: none yet
	lastOut bool         // last was sent
	dueOwed bool         // a Credit message found no room
	stalled bool         // data found no credit at its last attempt
	urgent  bool         // urgent data has used the control reserve since data last had room

	lent     []byte // what the application fills: room of a message, or of the box
	lentRoom []byte // … with its header, of a message; nil: it is of the box

	box    outbox
	offer  outOffer
	writes queue[int]    // lengths of RDMA writes under way
	reads  *atomic.Int32 // how many RDMA reads are, of the receiver
	lastID uint32        // of an offer

	wake  bool  // a waiting Write may go on
	fault error // the peer has broken the protocol

	committed uint64 // messages with bytes of the stream, or about bytes of it

	bytes, messages, offers, movedBytes, boxedBytes, lentBytes, stalls, noBox, unregistered uint64
}

// minFragment is the least room in bytes that a longer Write accepts: a ring skips a
// shorter rest at its end.
const minFragment = 2 << 10

// owedMost is enough: a peer that keeps to the protocol causes no more (see
// docs/PROTOCOL.md, Credits).
const owedMost = 2 * ControlReserve

// owedMessages wait in their order.
type owedMessages struct {
	m [owedMost]wire.Control
	n int
}

// replace puts c in the place of a message of its type that waits, if the last is enough.
func (o *owedMessages) replace(c *wire.Control) bool {
	if typ := c.Type(); typ != wire.TypeEmptied && typ != wire.TypeNearDone {
		return false
	}
	for i := range o.m[:o.n] {
		if o.m[i].Type() == c.Type() {
			o.m[i] = *c
			return true
		}
	}
	return false
}

// note reports whether a note waits, which goes before the rest of the stream.
func (o *owedMessages) note() bool {
	for i := range o.m[:o.n] {
		if o.m[i].Type() == wire.TypeNote {
			return true
		}
	}
	return false
}

// removeFirst removes the first k.
func (o *owedMessages) removeFirst(k int) { o.n = copy(o.m[:], o.m[k:o.n]) }

// violation notes what the peer has done.
func (t *sender) violation(err error) {
	if t.fault == nil {
		t.fault = err
	}
}

// credit is how many more messages may be sent.
func (t *sender) credit() int {
	left, err := t.credits.Left()
	if err != nil {
		t.violation(err)
	}
	if t.lentRoom != nil {
		left-- // that message's
	}
	return left
}

// pending reports whether something waits for room or credit.
func (t *sender) pending() bool {
	return t.owed.n > 0 || t.dueOwed || t.box.unsent() > 0 || t.last != 0 && !t.lastOut
}

// open reports whether bytes can still be written.
func (t *sender) open() bool { return !t.gone && t.last == 0 }

// take takes bytes from the front of p: into a message, or into the box. It returns how
// many; 0: there is no room now.
func (t *sender) take(p []byte, more bool) int {
	if !t.open() || t.lent != nil || len(p) == 0 {
		return 0
	}
	if t.pending() {
		t.flush()
	}
	if t.box.unsent() == 0 && !t.boxes(len(p)) {
		if n := t.message(p, more); n > 0 {
			return n
		}
	}
	return t.intoBox(p, more)
}

// message sends bytes from the front of p in one message, and returns how many.
func (t *sender) message(p []byte, more bool) int {
	room := t.room(min(len(p), minFragment), len(p))
	if room == nil {
		return 0
	}
	n := copy(room[wire.HeaderLen:], p)
	t.commit(room, wire.TypeData, wire.More(more || n < len(p)), wire.HeaderLen+n)
	t.bytes += uint64(n)
	return n
}

// whole sends all of p, of at most minFragment bytes, if nothing stands in its way.
func (t *sender) whole(p []byte) bool {
	if !t.open() || t.lent != nil || t.pending() || t.large(len(p)) || !t.inOne(p) {
		return false
	}
	t.bytes += uint64(len(p))
	return true
}

// inOne sends all of p in one message, if there is room for it.
func (t *sender) inOne(p []byte) bool {
	n := wire.HeaderLen + len(p)
	if n > t.maxMsg {
		return false
	}
	room := t.room(len(p), len(p))
	if room == nil {
		return false
	}
	copy(room[wire.HeaderLen:], p)
	t.commit(room, wire.TypeData, 0, n)
	return true
}

// packed sends all of v in one message, or nothing, and returns the bytes sent.
func (t *sender) packed(v [][]byte, more bool) int {
	sum := 0
	for _, b := range v {
		sum += len(b)
	}
	if sum == 0 || !t.open() || t.lent != nil {
		return 0
	}
	if t.pending() {
		t.flush()
	}
	if t.box.unsent() > 0 {
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
	t.commit(room, wire.TypeData, wire.More(more), at)
	t.bytes += uint64(sum)
	return sum
}

// room reserves a message with a place in the stream: lo to hi bytes behind its header.
func (t *sender) room(lo, hi int) []byte {
	if t.owed.note() {
		return nil
	}
	if t.credit() <= credit.Control {
		if !t.stalled {
			t.stalls++
		}
		t.stalled = true
		t.box.without = max(t.box.without, t.boxAfter)
		return nil
	}
	t.stalled = false
	room := t.msgs.Reserve(min(lo+wire.HeaderLen, t.maxMsg), min(hi+wire.HeaderLen, t.maxMsg))
	if room != nil {
		t.urgent = false
	}
	return room
}

// commit writes the header and sends the first n bytes of room.
func (t *sender) commit(room []byte, typ wire.Type, flags uint8, n int) {
	if t.abrupt && typ != wire.TypeUrgent {
		flags |= wire.FlagMore
	}
	wire.Header{Type: typ, Flags: flags, Credit: t.credits.Advertise()}.Put(room)
	t.msgs.Commit(n)
	t.counted(typ)
	t.credits.Mark()
	t.committed++
}

// underWay reports whether the peer has yet to get something of the stream; on a ring that
// is not known.
func (t *sender) underWay() bool {
	return t.credits.MarkedUnderWay() || t.box.unsent() > 0
}

func (t *sender) counted(typ wire.Type) {
	if typ != wire.TypeCredit {
		t.credits.Sent()
	}
	t.messages++
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
	t.msgs.CommitControl(c.Len())
	t.counted(c.Type())
	return true
}

// owe sends a control message, now or as soon as there is room.
func (t *sender) owe(c wire.Control) {
	switch {
	case t.gone, t.owed.n == 0 && t.send(&c):
	case t.owed.replace(&c):
	case t.owed.n == owedMost:
		t.violation(errors.New("it causes more control messages than it takes"))
	default:
		t.owed.m[t.owed.n] = c
		t.owed.n++
	}
}

// flush sends what waits.
func (t *sender) flush() {
	if t.gone {
		return
	}
	sent := 0
	for sent < t.owed.n && t.send(&t.owed.m[sent]) {
		sent++
	}
	if sent > 0 {
		t.owed.removeFirst(sent)
	}
	t.drainBox()
	if t.last != 0 && !t.lastOut && t.owed.n == 0 && t.box.unsent() == 0 {
		c := wire.Plain(t.last)
		t.lastOut = t.send(&c)
	}
	t.dueOwed = false
	if t.credits.Due() {
		c := wire.Plain(wire.TypeCredit)
		t.dueOwed = !t.send(&c)
	}
}

// finish queues the last message behind all that was written.
func (t *sender) finish(last wire.Type) {
	if t.gone || t.last == wire.TypeClose || t.last == wire.TypeAbort {
		return
	}
	if t.last != last {
		t.last, t.lastOut = last, false
	}
	t.flush()
}

// cutHere makes the stream count as cut at its present place. If there is no room for that,
// the next bytes do it.
func (t *sender) cutHere() {
	if !t.open() || t.lent != nil || t.pending() {
		return
	}
	if room := t.room(0, 0); room != nil {
		t.commit(room, wire.TypeData, wire.FlagMore, wire.HeaderLen)
	}
}

// urgentMessage sends urgent data: in data's room or, once while data is blocked, in the
// room that is held back for control.
func (t *sender) urgentMessage(p []byte) bool {
	if !t.open() {
		return false
	}
	n := wire.HeaderLen + len(p)
	if t.lentRoom == nil {
		if room := t.room(len(p), len(p)); room != nil {
			copy(room[wire.HeaderLen:], p)
			t.commit(room, wire.TypeUrgent, 0, n)
			return true
		}
	}
	if t.urgent || t.credit() < 1 {
		return false
	}
	room := t.msgs.ReserveControl(n)
	if room == nil {
		return false
	}
	t.urgent = true
	wire.Header{Type: wire.TypeUrgent, Credit: t.credits.Advertise()}.Put(room)
	copy(room[wire.HeaderLen:], p)
	t.msgs.CommitControl(n)
	t.counted(wire.TypeUrgent)
	return true
}

// lend reserves up to most bytes for the application to fill; nil: no room now.
func (t *sender) lend(most int) []byte {
	if !t.open() || t.lent != nil {
		return nil
	}
	if t.pending() {
		t.flush()
	}
	switch {
	case t.box.open():
		t.lent = t.box.free(most)
	case t.box.unsent() == 0:
		if room := t.room(min(most, minFragment), most); room != nil {
			t.lent, t.lentRoom = room[wire.HeaderLen:], room
		}
	}
	return t.lent
}

// unlend ends the loan: the first n bytes of it take their place in the stream, unless
// the stream has ended meanwhile.
func (t *sender) unlend(n int) (ok bool) {
	lent, room := t.lent, t.lentRoom
	t.lent, t.lentRoom = nil, nil
	t.wake = true
	if ok = t.open(); !ok {
		n = 0
	}
	t.bytes += uint64(n)
	t.lentBytes += uint64(n)
	switch {
	case room != nil && n > 0:
		t.commit(room, wire.TypeData, 0, wire.HeaderLen+n)
	case room != nil && !t.gone:
		t.msgs.Commit(0)
	case n > 0 && t.box.unsent() == 0 && !t.boxes(n) && t.inOne(lent[:n]): // not behind an RDMA write
	case n > 0:
		t.box.tail += int64(n)
		t.inWrite = false
		t.drainBox()
	}
	t.flush()
	return ok
}
