package ring

import (
	"fmt"
	"sync/atomic"
)

const (
	rewindAt  = 16 << 10 // from this offset on, continue at the ring's start if it is empty
	rewindTry = 4 << 10  // bytes between looks for an empty ring, each of which is a cache miss

	// fragment is the least room that Reserve gives when more was requested: smaller pieces at the edge
	// of a full ring cost more than waiting.
	fragment = 4 << 10
)

// Writer is the sending side of a ring. One goroutine at a time calls its methods, except Arm, Disarm,
// Armed, ReaderSleeps, Shrink and Pages, which others may call meanwhile.
//
// It uses the ring up to a limit, which grows while nobody reads. At the limit, a pad record sends the
// reader to the start of the next lap. So does a pad when the ring is empty and the writer has passed
// rewindAt: then light traffic stays in the same few cached pages.
type Writer struct {
	out   *Outgoing // this side's, as are cells and mem
	cells *Cells
	mem   *[Size]byte
	in    *Incoming
	extent

	tail      uint64 // where the next record goes
	published uint64 // out.tail
	head      uint64 // in.head as last read and checked
	room      int    // bytes that Reserve returned; 0: no data is reserved
	ctrlRoom  int    // bytes that ReserveControl returned
	spare     bool   // … in a cell
	spareTail uint64 // cells published
	spareHead uint64 // in.spareHead as last read and checked
	lapEnd    uint64 // the offset at which the writer left the last lap
	tryRewind uint64 // the next position at which to look for an empty ring
	rung      Rung   // for in.sleep
	alone     bool   // see Alone
	err       error  // how the reader broke the rules

	wanted atomic.Uint64 // the head position that makes room, for Arm
}

// Init prepares the zero Writer for an empty ring in mem, which is Size bytes long. The ring grows to
// most bytes; from Sure on only within the budget. pages bytes of mem have memory already, which the
// budget counts.
func (w *Writer) Init(out *Outgoing, cells *Cells, mem []byte, in *Incoming, most int, pages uint64, b Share) {
	w.out, w.cells, w.mem, w.in = out, cells, (*[Size]byte)(mem), in
	w.extent.init(most, pages, b)
}

// Alone is called after Init if in is still about an earlier ring, until Meet. Meanwhile there is room
// for what fits without the reader.
func (w *Writer) Alone() { w.alone = true }

// Meet ends Alone.
func (w *Writer) Meet() { w.alone = false }

// Reserve returns room for a message of least to most bytes, or nil if there is none now. It ends an
// earlier reservation.
func (w *Writer) Reserve(least, most int) (room []byte, do Action) {
	w.room, w.ctrlRoom = 0, 0
	n, do := w.find(least, most)
	if n == 0 {
		return nil, do
	}
	w.room = n
	return message(w.mem, w.tail, n), do
}

// Commit publishes the first n bytes of what Reserve returned. With 0 nothing is published, and the
// room is free again.
func (w *Writer) Commit(n int) (do Action) {
	if n > w.room {
		panic("ring: Commit of more than Reserve gave")
	}
	w.room = 0
	if n > 0 {
		w.record(n)
		w.out.due = uint32(w.tail)
	}
	return w.finish()
}

// ReserveControl returns room for a control message of n ≤ MaxControl bytes, or nil if there is none
// now. Between Reserve and Commit the room is a cell, and the message goes before the one that is being
// filled. It ends an earlier reservation of control.
func (w *Writer) ReserveControl(n int) (room []byte, do Action) {
	w.ctrlRoom, w.spare = 0, false
	if n > MaxControl {
		panic("ring: a control message of more than MaxControl")
	}
	found := 0
	if w.room == 0 {
		found, do = w.find(n, n)
	}
	if found != 0 {
		room = message(w.mem, w.tail, n)
	} else if room = w.spareCell(&do); room != nil {
		room, w.spare = room[:n:n], true
	}
	if room == nil {
		w.block()
		return nil, do
	}
	w.ctrlRoom = n
	return room, do
}

// CommitControl publishes the first n bytes of what ReserveControl returned; 0: nothing.
func (w *Writer) CommitControl(n int) (do Action) {
	if n > w.ctrlRoom {
		panic("ring: CommitControl of more than ReserveControl gave")
	}
	w.ctrlRoom = 0
	switch {
	case w.spare:
		w.spare = false
		if n == 0 {
			return 0
		}
		return w.commitCell(n)
	case n > 0:
		w.record(n)
		w.out.followDue(w.tail)
	}
	return w.finish()
}

// Arm makes the reader return Wake when there is room, or a cell, for the reservation that failed.
func (w *Writer) Arm() { w.out.want.Set(w.wanted.Load()) }

// Armed reports whether Disarm was not called since the last Arm. The reader may have returned Wake
// already.
func (w *Writer) Armed() bool { return w.out.want.isSet() }

// Disarm ends Arm.
func (w *Writer) Disarm() { w.out.want.clear() }

// ReaderSleeps reports whether the reader has armed and this side has not returned Wake for that. Any
// goroutine may call it.
func (w *Writer) ReaderSleeps() bool { return w.rung.waits(&w.in.sleep) }

// Err returns why a call returned Broken.
func (w *Writer) Err() error { return w.err }

func (w *Writer) broken(do *Action, format string, args ...any) {
	if w.err == nil {
		w.err = fmt.Errorf(format, args...)
	}
	*do |= Broken
}

// record writes the header of a record at tail, whose n bytes are there already.
func (w *Writer) record(n int) {
	putHeader(w.mem, w.tail, kindMessage|uint64(n))
	w.tail += recordSize(n)
}

// finish ends a reservation. It first publishes its record, or a pad before it: Shrink must not give
// back the page of a record that is not published.
func (w *Writer) finish() (do Action) {
	if w.tail != w.published {
		do = w.publish()
	}
	w.ungrab()
	return do
}

// publish shows all records to the reader.
func (w *Writer) publish() Action {
	w.published = w.tail
	w.out.tail.Store(w.tail)
	return w.wake()
}

// wake returns Wake if the reader sleeps.
func (w *Writer) wake() Action {
	if w.rung.Ring(&w.in.sleep) {
		return Wake
	}
	return 0
}

// find makes room for a record at tail, and returns the message's size in bytes, or 0 if there is no
// room.
func (w *Writer) find(least, most int) (n int, do Action) {
	if w.err != nil || w.pages.Load() > Start && !w.tryGrab() {
		return 0, 0 // Shrink returns met then, and its caller wakes the session
	}
	n, do = w.makeRoom(least, most)
	if n == 0 {
		do |= w.finish() // publishes a pad, which the reader must pass before there is room
		w.block()
	}
	return n, do
}

func (w *Writer) makeRoom(least, most int) (n int, do Action) {
	need, want := recordSize(least), recordSize(most)
	ahead, behind := w.available()
	rewind := w.tail >= w.tryRewind && w.tail&mask >= rewindAt
	if ahead < want || rewind {
		if !w.refresh(&do) {
			return 0, do
		}
		ahead, behind = w.available()
		if rewind {
			w.tryRewind = w.tail + rewindTry
			if w.head == w.tail && behind >= want {
				w.wrap()
				ahead, behind = w.available()
			}
		}
	}
	enough := max(need, min(want, fragment))
	for max(ahead, behind) < enough && (w.leap(enough) || w.grow(&do)) {
		ahead, behind = w.available()
	}
	if ahead < want && (behind >= want || ahead < enough && behind >= enough) {
		w.wrap()
		ahead = behind
	}
	if ahead < enough {
		return 0, do
	}
	return min(int(ahead)-headerSize, most), do
}

// available returns how many bytes fit ahead, and how many at the start of the ring if the writer may
// go there. There is always room for a pad.
func (w *Writer) available() (ahead, behind uint64) {
	off, head, end := w.tail&mask, w.head&mask, w.limit.Load()
	if w.sameLap() {
		behind = less(head, headerSize)
	} else if off < head { // the writer is behind the reader, which may be above a limit that has shrunk
		end = min(end, head)
	} // else the ring has grown, and the reader is in the previous lap, at a lower offset
	return less(end, off+headerSize), behind
}

// less is a-b, or 0 if that is negative.
func less(a, b uint64) uint64 {
	if a < b {
		return 0
	}
	return a - b
}

func (w *Writer) sameLap() bool { return w.tail/Size == w.head/Size }

// wrap continues at the start of the ring.
func (w *Writer) wrap() {
	off := w.tail & mask
	w.lapEnd = off + headerSize
	w.skip(Size - off)
}

// skip covers n bytes with a pad.
func (w *Writer) skip(n uint64) {
	putHeader(w.mem, w.tail, kindPad|n)
	w.tail += n
}

// refresh reads how far the reader has come. It returns false if what it reads is impossible.
func (w *Writer) refresh(do *Action) bool {
	if w.alone {
		return true
	}
	h := w.in.head.Load()
	if h == w.head {
		return true
	}
	inPad := h/Size != w.tail/Size && h&mask > w.lapEnd-headerSize
	if h < w.head || h > w.published || h%8 != 0 || inPad {
		w.broken(do, "head %d outside %d to %d, or behind %d of its lap", h, w.head, w.published, w.lapEnd)
		return false
	}
	w.head = h
	return true
}

// leap moves a writer that has caught up with the reader to the end of the lap that is being read. If
// the limit has grown since, there is room beyond. The bytes that it skips are lost for this lap, so it
// does that only for a good gain.
func (w *Writer) leap(need uint64) bool {
	off, limit := w.tail&mask, w.limit.Load()
	if w.sameLap() || off > w.head&mask || w.lapEnd+max(need+headerSize, limit/4) > limit {
		return false
	}
	w.skip(w.lapEnd - off)
	return true
}

// block notes how far the reader must come before another look for room is worthwhile: some way, but at
// most to where the largest message has room, or to the end of what is published.
func (w *Writer) block() {
	at := w.head + w.limit.Load()/8
	if lap := (w.head | mask) + 1; !w.sameLap() {
		if w.tail&mask < w.head&mask {
			at = min(at, lap) // from there on there is room up to the limit
		} else {
			at = lap + headerSize + MaxMessage
		}
	}
	w.wanted.Store(min(w.published, at))
}

// spareCell returns the memory of the next free cell, or nil.
func (w *Writer) spareCell(do *Action) []byte {
	if w.err != nil || w.alone {
		return nil
	}
	h := w.in.spareHead.Load()
	if h < w.spareHead || h > w.spareTail {
		w.broken(do, "head of cells %d outside %d to %d", h, w.spareHead, w.spareTail)
		return nil
	}
	w.spareHead = h
	if w.spareTail-h == Spares {
		return nil
	}
	return w.cells[w.spareTail%Spares].data[:]
}

// commitCell shows a cell to the reader. To keep the order, the reader takes it only after everything
// that is published in the ring already.
func (w *Writer) commitCell(n int) (do Action) {
	c := &w.cells[w.spareTail%Spares]
	c.size.Store(uint64(n))
	if w.tail != w.published {
		do = w.publish() // a pad
	}
	c.after.Store(w.published)
	w.spareTail++
	w.out.spareTail.Store(w.spareTail)
	return do | w.wake()
}
