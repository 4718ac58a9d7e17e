package ring

import (
	"bytes"
	"fmt"
)

const (
	// headBatch is how many bytes the reader frees before it tells a writer that does not wait:
	// publishing after every message would cost a cache miss each.
	headBatch = 8 << 10

	// mostPads is more pads than a writer ever needs in a row. It bounds Poll.
	mostPads = 8

	// mostCopies bounds the kept messages from cells, as the ring does not. A writer that uses cells
	// only for control messages never needs more.
	mostCopies = 8 * Spares
)

// Reader is the receiving side of a ring. One goroutine at a time calls its methods, except Arm,
// Disarm, Armed and WriterWaits, which others may call meanwhile.
//
// All bounds are in private memory: the writer's tail is checked when it is read, a record when Poll
// finds it, and the sizes of kept messages are stored here.
type Reader struct {
	in    *Incoming // this side's
	out   *Outgoing
	cells *Cells
	mem   *[Size]byte

	scan      uint64 // the next record that Poll looks at
	tail      uint64 // out.tail as last read and checked
	head      uint64 // everything before it is free
	published uint64 // in.head, the head that the writer knows

	spare     uint64 // cells consumed, in.spareHead
	spareTail uint64 // out.spareTail as last read and checked

	current     int    // size of the last Poll's message
	currentCell []byte // the last Poll's message, if it is in a cell
	kept        keptMessages
	keptBytes   uint64 // bytes of the ring that kept messages take
	rung        Rung   // for out.want
	err         error  // how the writer broke the rules
}

// Init prepares the zero Reader for an empty ring in mem, which is Size bytes long.
func (r *Reader) Init(out *Outgoing, cells *Cells, mem []byte, in *Incoming) {
	r.out, r.cells, r.mem, r.in = out, cells, (*[Size]byte)(mem), in
}

// Poll returns the next message, or nil. The message stays in place until Drop, or until Keep and
// Release. Drop or Keep must be called before the next Poll.
func (r *Reader) Poll() (msg []byte, do Action) {
	for looks := 0; ; looks++ {
		if r.spare != r.spareTail {
			if msg, do = r.pollCell(); msg != nil || do != 0 {
				return msg, do
			}
		}
		if r.scan == r.tail {
			if news := r.look(&do); !news {
				return nil, do
			}
			continue
		}
		h := header(r.mem, r.scan)
		n, off := h&lengthMask, r.scan&mask
		switch h &^ lengthMask {
		case kindMessage:
			if n-1 < MaxMessage && r.scan+recordSize(int(n)) <= r.tail && off+recordSize(int(n)) <= Size {
				r.current = int(n)
				return message(r.mem, r.scan, int(n)), do
			}
		case kindPad:
			if n >= headerSize && n%8 == 0 && n <= r.tail-r.scan && off+n <= Size && looks <= mostPads {
				r.scan += n
				do |= r.consumed()
				continue
			}
		}
		r.broken(&do, "record header %#x at offset %d", h, off)
		return nil, do
	}
}

// Drop frees the last Poll's message.
func (r *Reader) Drop() (do Action) {
	if r.currentCell != nil {
		return r.dropCell()
	}
	r.scan += recordSize(r.current)
	return r.consumed()
}

// Keep leaves the last Poll's message in place, after those kept before.
func (r *Reader) Keep() (do Action) {
	if r.currentCell == nil {
		r.kept.push(r.scan, r.current)
		r.scan += recordSize(r.current)
		// The tail is checked by laps only: it may be almost two rings ahead of a head that does not
		// move.
		if r.keptBytes += recordSize(r.current); r.keptBytes > Size {
			r.broken(&do, "%d bytes of messages that are kept", r.keptBytes)
		}
		return do
	}
	r.kept.pushCopy(r.scan, bytes.Clone(r.currentCell)) // the cell itself must be free for the writer
	do = r.dropCell()
	if n := len(r.kept.copies); n > mostCopies {
		r.broken(&do, "%d messages of cells that are kept", n)
	}
	return do
}

// Front returns the oldest kept message, or nil.
func (r *Reader) Front() []byte {
	if r.kept.count == 0 {
		return nil
	}
	size, spare := r.kept.front()
	if spare != nil {
		return spare
	}
	return message(r.mem, r.kept.at, size)
}

// Release frees the oldest kept message, if there is one.
func (r *Reader) Release() (do Action) {
	if r.kept.count == 0 {
		return 0
	}
	if size, spare := r.kept.front(); spare == nil {
		r.keptBytes -= recordSize(size)
	}
	r.kept.pop()
	return r.consumed()
}

// Arm makes the writer return Wake when there is another message.
func (r *Reader) Arm() { r.in.sleep.Set(0) }

// Armed reports whether Disarm was not called since the last Arm. The writer may have returned Wake
// already.
func (r *Reader) Armed() bool { return r.in.sleep.isSet() }

// Disarm ends Arm.
func (r *Reader) Disarm() { r.in.sleep.clear() }

// WriterWaits reports whether the writer has armed and this side has not returned Wake for that. Any
// goroutine may call it.
func (r *Reader) WriterWaits() bool { return r.rung.waits(&r.out.want) }

// Err returns why a call returned Broken.
func (r *Reader) Err() error { return r.err }

// broken ends the reading: no further message is found.
func (r *Reader) broken(do *Action, format string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf(format, args...)
	}
	r.tail, r.spareTail = r.scan, r.spare
	*do |= Broken
}

// look reads how far the writer has come, and reports whether there is more. If not, it publishes the
// head.
func (r *Reader) look(do *Action) (news bool) {
	if r.err != nil {
		return false
	}
	t := r.out.tail.Load()
	// Read after the tail, so that every cell that was committed before t is seen.
	if n := r.out.spareTail.Load(); n != r.spareTail {
		if n < r.spareTail || n-r.spare > Spares {
			r.broken(do, "tail of cells %d after %d", n, r.spareTail)
			return false
		}
		r.spareTail, news = n, true
	}
	if t != r.tail {
		// The writer is never more than one lap ahead of the reader.
		if t < r.tail || t/Size > r.published/Size+1 || t%8 != 0 {
			r.broken(do, "tail %d after %d, head %d", t, r.tail, r.published)
			return false
		}
		r.tail, news = t, true
	}
	if !news {
		*do |= r.publishHead()
	}
	return news
}

// consumed moves the head to the oldest record in use: the first kept one, or else the next one for
// Poll.
func (r *Reader) consumed() Action {
	r.head = r.scan
	if r.kept.count > 0 {
		r.head = r.kept.at
	}
	r.in.done = uint32(r.head)
	if r.head-r.published >= headBatch || r.rung.waits(&r.out.want) {
		return r.publishHead()
	}
	return 0
}

// publishHead frees room, and returns Wake if the writer waits for this much.
func (r *Reader) publishHead() Action {
	if r.head == r.published {
		return 0
	}
	r.published = r.head
	r.in.head.Store(r.head)
	if r.rung.ringAt(&r.out.want, r.head) {
		return Wake
	}
	return 0
}

// pollCell returns the message in the next cell, if Poll has passed everything that was sent before it.
func (r *Reader) pollCell() (msg []byte, do Action) {
	c := &r.cells[r.spare%Spares]
	if c.after.Load() > r.scan {
		return nil, 0
	}
	size := c.size.Load()
	if size-1 >= MaxControl {
		r.broken(&do, "a cell of %d bytes", size)
		return nil, do
	}
	r.currentCell = c.data[:size:size]
	return r.currentCell, 0
}

// dropCell frees the current cell.
func (r *Reader) dropCell() Action {
	r.currentCell = nil
	r.spare++
	r.in.spareHead.Store(r.spare)
	if r.rung.Ring(&r.out.want) {
		return Wake
	}
	return 0
}
