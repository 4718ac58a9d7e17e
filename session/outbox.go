package session

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/sanconn/san/session/internal/wire"
)

// outbox is the buffer of this end's direction where the provider is none: a ring of bytes
// that Writes have copied, on their way to the peer (D8). If it lies in the provider's
// memory, RDMA writes take its bytes to the peer's inbox (inbox.go), another ring, and the
// Fill after each announces them; their place in the stream is that of the Fill. On the
// heap, for Writes that find no credit, its bytes leave in messages.
//
// Positions only grow.
type outbox struct {
	buf    []byte // nil: closed
	onHeap bool   // it is not the provider's
	plain  bool   // its bytes leave in messages: it is on the heap, or cannot be registered

	written int64 // up to here the room is free again
	sent    int64 // … the bytes have been sent, as far as this end is concerned
	tail    int64 // … it is filled

	inbox   Descriptor // the peer's; Len 0: none
	filled  int64      // bytes announced by Fill since the inbox was opened
	emptied int64      // … read by the peer
	wanted  bool       // AskInbox was sent and not answered
	skip    int        // Writes until the next AskInbox, after memory was short
	without int        // bytes of Writes that an inbox would have served, since there was one
	size    int        // of the inbox that is asked for, and at first of the box
	fulls   int        // times that a Write has found the box full

	full    bool        // a Write waits until a good part of it is free
	largest bool        // there was no memory for a larger one, since it was last empty
	blocked atomic.Bool // the queue was full: no RDMA write is tried before one, or a read, has completed
	resting bool        // the timer of Session.leaveIfIdle runs
}

const (
	// At a time as many bytes are copied and then sent as are on their way, but at
	// least boxUnit, and at most boxMost or half of what is left of the Write: so
	// something is on its way while the last part is copied.
	boxUnit = 128 << 10
	boxMost = 512 << 10
	// 1/boxShareFree of a full box has to be free before a Write goes on: waking it
	// for a few bytes costs more than sending them.
	boxShareFree = 4
	// skipShort is how many Writes do without a registered box after memory ran out here
	// or at the peer; skipLong after it could not be registered, as each attempt costs the
	// process all its idle registrations.
	skipShort = 32
	skipLong  = 1024
	// heapBox is the first and heapBoxMost the largest size in bytes of a box on the heap.
	heapBox     = 16 << 10
	heapBoxMost = 256 << 10
	// When Writes have found the box full growAfter times, an inbox of growBy times the size
	// takes the place of the one there is. A box grows as much when the peer's application
	// alone could make room in it.
	growAfter = 4
	growBy    = 4
	// boxRest is the time between checks for use: idle boxes are kept for one to two
	// seconds.
	boxRest = time.Second
)

func (o *outbox) unsent() int { return int(o.tail - o.sent) }

func (o *outbox) used() int { return int(o.tail - o.written) }

func (o *outbox) room() int { return len(o.buf) - o.used() }

// providers reports whether its memory is the provider's.
func (o *outbox) providers() bool { return o.buf != nil && !o.onHeap }

// registered reports whether its bytes leave by RDMA.
func (o *outbox) registered() bool { return o.buf != nil && !o.plain }

// put copies bytes from the front of p, as far as there is room, and returns how many.
func (o *outbox) put(p []byte) int {
	n := min(len(p), o.room())
	if n == 0 {
		return 0
	}
	at := int(o.tail % int64(len(o.buf)))
	copy(o.buf, p[copy(o.buf[at:], p[:n]):n])
	o.tail += int64(n)
	return n
}

// free returns room behind the tail, up to most bytes; nil: there is none.
func (o *outbox) free(most int) []byte {
	if o.used() == 0 {
		o.written, o.sent, o.tail = 0, 0, 0 // the longest piece
	}
	n := min(most, o.room())
	if n == 0 {
		return nil
	}
	at := int(o.tail % int64(len(o.buf)))
	n = min(n, len(o.buf)-at)
	return o.buf[at : at+n : at+n]
}

// next returns bytes that have not been sent, up to where the ring wraps.
func (o *outbox) next() []byte {
	at := int(o.sent % int64(len(o.buf)))
	return o.buf[at:min(at+o.unsent(), len(o.buf))]
}

// freed frees the room of the first n bytes.
func (o *outbox) freed(n int) {
	o.written += int64(n)
	o.largest = o.largest && o.used() > 0
}

// replace puts buf in the place of the buffer, which is empty or on the heap, and has it take
// what was not sent.
func (o *outbox) replace(buf []byte, onHeap bool) {
	to := outbox{buf: buf}
	for o.unsent() > 0 {
		o.sent += int64(to.put(o.next()))
	}
	o.buf, o.onHeap, o.plain, o.full, o.largest = buf, onHeap, onHeap, false, false
	o.written, o.sent, o.tail = 0, 0, to.tail
}

// close forgets buffer and content.
func (o *outbox) close() {
	o.buf, o.onHeap, o.plain, o.full, o.largest = nil, false, false, false, false
	o.written, o.sent, o.tail = 0, 0, 0
}

// release forgets what memory there is of the provider, and returns it.
func (o *outbox) release() (providers []byte) {
	if !o.providers() {
		return nil
	}
	providers = o.buf
	o.close()
	return providers
}

// foundFull counts a Write that begins to wait for room.
func (t *sender) foundFull() {
	o := &t.box
	if o.full {
		return
	}
	o.full = true
	if o.fulls++; o.fulls >= growAfter && o.size < t.boxBudget && o.inbox.Len > 0 {
		t.growInbox()
	}
}

// boxes reports whether n bytes of a Write go through the box though a message might take
// them.
func (t *sender) boxes(n int) bool {
	return t.box.registered() && n >= t.boxFrom
}

// intoBox copies bytes from the front of p to the box, sends what can be sent, and returns
// how many it copied.
func (t *sender) intoBox(p []byte, more bool) int {
	o := &t.box
	n := len(p)
	switch {
	case o.registered():
		n = min(n, max(boxUnit, min(boxMost, int(o.sent-o.written), n/2)))
		if room := o.room(); room < n || o.full {
			if room < len(o.buf)/boxShareFree {
				t.foundFull()
				return 0
			}
			o.full = false
			n = min(n, room)
		}
	case o.plain && !o.onHeap:
		return 0 // nothing follows until it is empty and given back
	case o.room() < n:
		t.growHeapBox(n)
	}
	n = o.put(p[:n])
	t.bytes += uint64(n)
	if n > 0 {
		t.inWrite = more || n < len(p)
	}
	t.drainBox()
	return n
}

// growHeapBox makes room for n more bytes in a box on the heap, as far as the limit
// allows, and reports whether there is more than before.
func (t *sender) growHeapBox(n int) bool {
	o := &t.box
	if o.providers() {
		return false
	}
	size := max(len(o.buf), min(heapBox, t.boxLimit))
	for size < o.used()+n && size < t.boxLimit {
		size = min(2*size, t.boxLimit)
	}
	if size <= len(o.buf) {
		return false
	}
	o.replace(make([]byte, size), true)
	return true
}

// drainBox sends what the box has, as far as there is room in the peer's inbox, in the
// queue, and credit.
func (t *sender) drainBox() {
	o := &t.box
	for o.unsent() > 0 {
		if o.plain {
			if !t.boxToMessage() {
				return
			}
		} else if !t.boxToInbox() {
			return
		}
	}
	if o.onHeap && t.lent == nil && len(o.buf) > heapBox {
		o.close() // an idle connection keeps little
	}
}

// boxToMessage sends a message of what the box holds, once nothing of it is on its way by
// RDMA, as room becomes free in order.
func (t *sender) boxToMessage() bool {
	o := &t.box
	if o.sent != o.written {
		return false
	}
	b := o.next()
	room := t.room(min(len(b), minFragment), len(b))
	if room == nil {
		return false
	}
	n := copy(room[wire.HeaderLen:], b)
	o.sent += int64(n)
	o.freed(n)
	t.commit(room, wire.TypeData, wire.More(o.unsent() > 0 || t.inWrite), wire.HeaderLen+n)
	t.wakeForRoom()
	return true
}

// boxToInbox starts an RDMA write of what the box holds, and announces it. What is sent
// later arrives later.
func (t *sender) boxToInbox() bool {
	o := &t.box
	if o.inbox.Len == 0 {
		return false // a larger one is to come
	}
	b := o.next()
	to := int(o.filled % int64(o.inbox.Len))
	n := min(len(b), int(o.inbox.Len)-to, int(o.inbox.Len)-int(o.filled-o.emptied), t.maxRDMA)
	if n == 0 || o.blocked.Load() {
		return false
	}
	room := t.room(wire.FillLen-wire.HeaderLen, wire.FillLen-wire.HeaderLen)
	if room == nil {
		return false
	}
	if err := t.mem.Write(b[:n], o.inbox, to, 0); err != nil {
		t.msgs.Commit(0)
		if err == ErrWouldBlock {
			o.blocked.Store(true) // before it looks at the reads, as handleLocked looks after counting them
			o.blocked.Store(t.writes.len() > 0 || t.reads.Load() > 0)
			return false
		}
		o.plain = true // it may have been unregistered in favor of others
		return true
	}
	t.writes.push(n)
	o.sent += int64(n)
	o.filled += int64(n)
	t.boxedBytes += uint64(n)
	wire.Fill{Length: uint32(n)}.Put(room)
	t.commit(room, wire.TypeFill, wire.More(o.unsent() > 0 || t.inWrite), wire.FillLen)
	return true
}

// boxWritten handles the completion of an RDMA write to the peer's inbox.
func (t *sender) boxWritten(err error) {
	n, ok := t.writes.pop()
	t.box.blocked.Store(false)
	if !ok {
		t.violation(errors.New("completion of a write that was not started"))
	}
	if !ok || err != nil { // Endpoint.Err follows; what has come before it can still be read
		return
	}
	t.box.freed(n)
	if t.box.unsent() > 0 {
		t.flush()
	}
	t.wakeForRoom()
	t.wake = t.wake || t.boxStuck()
}

// wakeForRoom wakes a waiting Write if there is enough room.
func (t *sender) wakeForRoom() {
	if o := &t.box; o.room() >= len(o.buf)/boxShareFree {
		t.wake = true
	}
}

// wantInbox requests the peer's inbox if there is none and it pays, for n bytes of a Write
// and those before, but not for a box that empties as messages. It reports whether there is
// one, but no memory for a registered box.
func (t *sender) wantInbox(n int) (alloc bool) {
	o := &t.box
	if t.gone || t.lent != nil {
		return false
	}
	if n > 0 && o.inbox.Len == 0 && !o.wanted && !o.providers() {
		o.without = min(o.without+min(n, maxBox), maxBox)
		switch {
		case o.skip > 0:
			o.skip--
		case o.without >= t.boxAfter:
			o.wanted = true
			t.owe(wire.AskInbox{Length: uint64(o.size)}.Control())
		}
	}
	return t.boxMissing()
}

// boxMissing reports whether there is an inbox, but no registered box.
func (t *sender) boxMissing() bool {
	o := &t.box
	return o.inbox.Len > 0 && !o.providers() && t.lent == nil
}

// boxStuck reports whether hardly any room is left in a box that may be larger, and none of it
// becomes free by itself: the inbox is full, or a larger one is to come.
func (t *sender) boxStuck() bool {
	o := &t.box
	return o.registered() && o.sent == o.written && o.unsent() > 0 && o.room() < len(o.buf)/boxShareFree &&
		len(o.buf) < t.boxBudget && !o.largest && t.lent == nil && !t.gone
}

// openBox makes buf the box; nil: there was no memory for it. unused is the memory of the one
// before, or buf if the box on the heap does not fit it yet.
func (t *sender) openBox(buf []byte) (unused []byte) {
	o := &t.box
	switch old := o.buf; {
	case o.registered():
		if o.largest = len(buf) <= len(old); o.largest || o.sent != o.written {
			return buf
		}
		o.replace(buf, false)
		t.flush()
		return old
	case o.plain && !o.onHeap: // since the memory was looked for: it empties, and is given back then
		return buf
	case buf == nil:
		t.noBox++
		t.leaveInbox()
		o.skip = skipShort
	case o.unsent() > len(buf):
		return buf
	default:
		o.replace(buf, false)
		t.flush()
	}
	return nil
}

// leaveInbox ends the use of the peer's inbox, and returns the box's memory if it is the
// provider's. The box is empty, or on the heap; the next one begins small.
func (t *sender) leaveInbox() (providers []byte) {
	o := &t.box
	left := o.inbox.Len > 0
	switch spent := o.plain && !o.onHeap; {
	case spent && left:
		o.skip = skipLong
	case spent: // the peer had no memory for a larger one
		o.skip = skipShort
	default:
		o.skip = 0
	}
	providers = o.release()
	o.inbox, o.filled, o.emptied, o.wanted, o.without, o.fulls = Descriptor{}, 0, 0, false, 0, 0
	o.size = t.boxFirst
	if left {
		t.owe(wire.Plain(wire.TypeLeaveInbox))
	}
	return providers
}

// growInbox asks for a larger inbox in the place of the one there is. What is on its way there
// arrives before LeaveInbox does; what the box holds besides waits for the answer.
func (t *sender) growInbox() {
	o := &t.box
	o.size = min(growBy*o.size, t.boxBudget)
	o.inbox, o.filled, o.emptied, o.fulls, o.wanted = Descriptor{}, 0, 0, 0, true
	t.owe(wire.Plain(wire.TypeLeaveInbox))
	t.owe(wire.AskInbox{Length: uint64(o.size)}.Control())
}

// unusable reports whether the box is the provider's, cannot be registered, and is empty.
func (o *outbox) unusable() bool { return o.plain && !o.onHeap && o.used() == 0 }

// holds reports whether there is memory of the provider, here or at the peer.
func (o *outbox) holds() bool { return o.inbox.Len > 0 || o.providers() }

// idle reports whether nothing was written since position at, and all has been written.
func (o *outbox) idle(at int64) bool {
	return o.holds() && !o.wanted && o.filled == at && (o.onHeap || o.used() == 0)
}

// inboxByPeer handles the answer to AskInbox; a length of 0: the peer has no memory.
func (t *sender) inboxByPeer(d Descriptor) {
	o := &t.box
	if !o.wanted || d.Len > maxBox {
		t.violation(fmt.Errorf("an inbox of %d bytes that was not asked for", d.Len))
		return
	}
	if o.wanted, o.inbox = false, d; d.Len == 0 {
		t.noBox++
		o.skip = skipShort
		o.plain = o.buf != nil // what a box holds for a larger inbox leaves in messages
	} else {
		t.wake = true // a Write that waits goes on through it
	}
	t.flush()
}

// emptiedByPeer handles Emptied: the peer has read its inbox up to upTo.
func (t *sender) emptiedByPeer(upTo uint64) {
	o := &t.box
	if o.inbox.Len == 0 {
		return // it crossed our LeaveInbox
	}
	if upTo > uint64(o.filled) || int64(upTo) < o.emptied {
		t.violation(fmt.Errorf("it has read %d bytes of %d in its inbox, and before that %d", upTo, o.filled, o.emptied))
		return
	}
	o.emptied = int64(upTo)
	t.flush()
}

// unblock has the box go on after an RDMA has completed.
func (t *sender) unblock() {
	t.box.blocked.Store(false)
	t.flush()
}
