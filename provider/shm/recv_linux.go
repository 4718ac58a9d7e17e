package shm

import (
	"bytes"

	"github.com/sanconn/san/session"
)

// headBatch is how many bytes the reader consumes before it tells a writer that is not
// waiting: doing so for every message would cost a cache miss each.
const headBatch = 8 << 10

// mostPads is more pads than a writer ever needs in a row. It bounds Poll.
const mostPads = 8

// mostCopies bounds the kept messages from spare cells, which the ring does not bound. A
// sender that uses the cells only for control never needs more.
const mostCopies = 8 * spares

// receiver is the reader's side of a ring. All bounds are local: the peer's tail is
// checked when it is read, a record when Poll finds it, and the positions and sizes of
// kept records are stored here.
type receiver struct {
	control *ringControl
	notes   *notes
	ring    *[ringSize]byte

	scan      uint64 // the next record that Poll looks at
	tail      uint64 // control.tail as last read and checked
	head      uint64 // everything before it is free
	published uint64 // control.head: the head that the writer knows
	current   record // of the last Poll

	spares         *[spares]spareCell
	spare          uint64 // cells consumed, control.spareHead
	spareTail      uint64 // control.spareTail as last read and checked
	currentIsSpare bool

	kept  []record // ring buffer: count records from first; its length is a power of two
	first int
	count int

	copies int // kept records from spare cells
}

// record is a message in the ring.
type record struct {
	at   uint64 // position of its header
	size int    // of the message in bytes
	copy []byte // the message, if it came by a spare cell
}

func (r record) end() uint64 { return r.at + uint64(headerSize+align8(r.size)) }

func (r *receiver) bytes(m record) []byte {
	if m.copy != nil {
		return m.copy
	}
	off := m.at&ringMask + headerSize
	return r.ring[off : off+uint64(m.size) : off+uint64(m.size)]
}

// Poll implements session.Endpoint.
func (e *endpoint) Poll(ev *session.Event) bool {
	r := &e.recv
	for pads := 0; ; pads++ {
		if e.bad.Load() {
			return false
		}
		if r.spare != r.spareTail && e.pollSpare(ev) {
			return true
		}
		if r.scan == r.tail {
			if !e.more() {
				return false
			}
			continue
		}
		off := r.scan & ringMask
		h := header(r.ring, off)
		if n := h & lengthMask; h&^lengthMask == kindPad {
			if n < headerSize || n%8 != 0 || n > r.tail-r.scan || off+n > ringSize || pads > mostPads {
				return e.badRecord(h, off)
			}
			r.scan += n
			e.consumed()
			continue
		}
		if h&^lengthMask != kindMessage || h&lengthMask > messageMax {
			return e.badRecord(h, off)
		}
		m := record{at: r.scan, size: int(h & lengthMask)}
		if m.end() > r.tail || off+m.end()-m.at > ringSize {
			return e.badRecord(h, off)
		}
		r.current, r.currentIsSpare = m, false
		ev.Kind, ev.ID, ev.Err = session.Message, 0, nil
		ev.Msg = r.bytes(m)
		return true
	}
}

// pollSpare takes the message of the next spare cell, once Poll is past everything that
// was sent before it.
func (e *endpoint) pollSpare(ev *session.Event) bool {
	r := &e.recv
	c := &r.spares[r.spare%spares]
	if c.after.Load() > r.scan {
		return false
	}
	size := c.size.Load()
	if size > session.MaxControl {
		e.violation("a spare cell of %d bytes", size)
		r.spareTail = r.spare
		return false
	}
	r.currentIsSpare = true
	ev.Kind, ev.ID, ev.Err = session.Message, 0, nil
	ev.Msg = c.data[:size:size]
	r.current = record{at: r.scan, copy: ev.Msg}
	return true
}

// dropSpare frees the current spare cell.
func (e *endpoint) dropSpare() {
	r := &e.recv
	r.spare++
	r.control.spareHead.Store(r.spare)
	if r.control.want.Load() != 0 && r.control.want.Swap(0) != 0 {
		e.link.ring(e.slot.number, session.SendReady)
	}
}

func (e *endpoint) badRecord(h, off uint64) bool {
	e.violation("record header %#x at offset %d", h, off)
	e.recv.tail = e.recv.scan
	return false
}

// more looks for new records. If there are none it gives back what has been consumed,
// and checks whether the peer has ended.
func (e *endpoint) more() bool {
	if e.bad.Load() {
		return false
	}
	if e.newTail() {
		return true
	}
	e.publishHead()
	// The tail is read again after the state, to find what the peer committed before
	// it closed.
	if state := e.theirs.load(); state != stateOpen {
		if e.newTail() {
			return true
		}
		e.peerState(state)
	}
	return false
}

func (e *endpoint) newTail() (news bool) {
	r := &e.recv
	t := r.control.tail.Load()
	// Read after the tail, so that every cell committed before t is known as well.
	if n := r.control.spareTail.Load(); n != r.spareTail {
		if n < r.spareTail || n-r.spare > spares {
			e.violation("spare tail %d after %d", n, r.spareTail)
			return false
		}
		r.spareTail, news = n, true
	}
	if t == r.tail {
		return news
	}
	// The writer is never more than one lap ahead of the reader.
	if t < r.tail || t/ringSize > r.published/ringSize+1 || t%8 != 0 {
		e.violation("tail %d after %d, head %d", t, r.tail, r.published)
		return false
	}
	r.tail = t
	return true
}

// Drop implements session.Endpoint.
func (e *endpoint) Drop() {
	if e.recv.currentIsSpare {
		e.dropSpare()
		return
	}
	e.recv.scan = e.recv.current.end()
	e.consumed()
}

// Keep implements session.Endpoint.
func (e *endpoint) Keep() {
	r := &e.recv
	if r.count == len(r.kept) {
		grown := make([]record, max(16, 2*len(r.kept)))
		n := copy(grown, r.kept[r.first:])
		copy(grown[n:], r.kept[:r.first])
		r.kept, r.first = grown, 0
	}
	if r.currentIsSpare {
		r.current.copy = bytes.Clone(r.current.copy)
		if r.copies++; r.copies > mostCopies {
			e.violation("%d messages of spare cells that are kept", r.copies)
		}
		e.dropSpare()
	} else {
		r.scan = r.current.end()
	}
	r.kept[(r.first+r.count)&(len(r.kept)-1)] = r.current
	r.count++
}

// Front implements session.Endpoint.
func (e *endpoint) Front() []byte {
	r := &e.recv
	if r.count == 0 {
		return nil
	}
	return r.bytes(r.kept[r.first])
}

// Release implements session.Endpoint.
func (e *endpoint) Release() {
	r := &e.recv
	if r.count == 0 {
		return
	}
	if r.kept[r.first].copy != nil {
		r.kept[r.first].copy = nil
		r.copies--
	}
	r.first = (r.first + 1) & (len(r.kept) - 1)
	if r.count--; r.count == 0 && len(r.kept) > keptIdle {
		r.kept, r.first = nil, 0
	}
	e.consumed()
}

// keptIdle is the most records that an empty queue of kept records keeps room for: small
// messages that are not read for a while make it grow to two and a half times the ring.
const keptIdle = 1 << 10

// consumed moves the head up to the oldest record that is still in use: the first kept
// one, else the next that Poll looks at.
func (e *endpoint) consumed() {
	r := &e.recv
	r.head = r.scan
	if r.count > 0 {
		r.head = r.kept[r.first].at
	}
	r.notes.done = uint32(r.head)
	if r.head-r.published >= headBatch || r.control.want.Load() != 0 {
		e.publishHead()
	}
}

// publishHead frees room, and wakes the writer if it waits for that much.
func (e *endpoint) publishHead() {
	r := &e.recv
	if r.head == r.published {
		return
	}
	r.published = r.head
	r.control.head.Store(r.head)
	if w := r.control.want.Load(); w != 0 && r.head >= w && r.control.want.Swap(0) != 0 {
		e.link.ring(e.slot.number, session.SendReady)
	}
}
