// Package ring carries messages from one process to another through memory that both
// map: a Writer and a Reader of a ring of bytes. It knows neither connections nor
// sessions, makes no system call, and sleeps nowhere. What a call leaves to be done, such
// as waking the other process, it returns as an Action.
//
// The memory of a ring is Size bytes for the messages; Outgoing and Incoming, with the words
// by which the two sides agree; and Cells with room for control messages, for which the ring
// may have none. Each side writes only what is its own: the reader Incoming, the writer the
// rest, and what one side writes the other need only be able to read. It may change at any
// time. So each side keeps its own positions, checks what it reads of the other's, and reads a
// length once. Whatever the other process writes, no call panics, runs on, or touches memory
// outside; it ends with Broken at worst, or with messages of any content.
//
// Positions only grow. A position's low bits are the offset in the ring, the others the
// lap. A record is a header and a message, and never crosses the end of the ring.
package ring

import (
	"sync/atomic"
	"unsafe"
)

const (
	// Size is the length of a ring in bytes of addresses: memory is committed when it
	// is touched.
	Size = 4 << 20
	mask = Size - 1

	// MaxMessage is the largest message in bytes, and so how much of a stream is
	// published at a time: 16 to 64 KiB keep both processes busy without bouncing a
	// cache line for every few bytes.
	MaxMessage = 64 << 10

	// MaxControl is the largest control message in bytes.
	MaxControl = 256

	// Spares is how many control messages find room when the ring has none.
	Spares = 16
)

// Action is what a call leaves to its caller. It is a set.
type Action uint8

const (
	// Wake: the other side waits for what has happened, and has to be woken.
	Wake Action = 1 << iota
	// Grew: there is memory that Shrink may give back.
	Grew
	// Broken: the other side broke the rules, as Err tells. Nothing more goes this way.
	Broken
)

// Outgoing is what a ring's writer says, beside the messages, and Incoming what its reader says.
// Words that are written at different times are two cache lines apart, because processors fetch
// lines in pairs. The zero values are an empty ring's.
type Outgoing struct {
	tail      atomic.Uint64 // bytes published
	spareTail atomic.Uint64 // cells published
	_         [112]byte
	want      Alarm // to be woken when head reaches a place
	_         [120]byte
	due       uint32 // see Unread; the reader does not use it
	_         [124]byte
}

type Incoming struct {
	head      atomic.Uint64 // bytes freed
	spareHead atomic.Uint64 // cells freed
	_         [112]byte
	sleep     Alarm // to be woken when tail moves
	_         [120]byte
	done      uint32 // see Unread
	_         [124]byte
}

// Reset makes the ring empty for its next Writer.
func (o *Outgoing) Reset() {
	o.tail.Store(0)
	o.spareTail.Store(0)
	o.want.clear()
	o.due = 0
}

// Reset makes the ring empty for its next Reader.
func (i *Incoming) Reset() {
	i.head.Store(0)
	i.spareHead.Store(0)
	i.sleep.clear()
	i.done = 0
}

// Backlog is how many bytes were published and not freed, by what both ends say.
func (o *Outgoing) Backlog(by *Incoming) uint64 { return o.tail.Load() - by.head.Load() }

// Unread reports, when the reader's process has died, whether it left data unread. TCP
// tells that by a reset; here the writer's process finds out from two positions, modulo 2³²:
//
//	due   the end of the last message that is not control
//	done  everything before it was dropped or released; exact, unlike head, which may
//	      lag by headBatch
//
// Both are plain stores into cache lines that nobody else touches: atomic stores would cost
// a twentieth of a round trip for each message, and due beside the tail a fiftieth. The
// kernel has reported the death, hence done is read after all stores of its process. due
// may be stored at the same moment: that message counts or not, like a Write that crosses
// a reset. The dead process can have written anything to done; it decides only how its
// connection ends.
func (o *Outgoing) Unread(by *Incoming) bool { return int32(o.due-by.done) > 0 }

// followDue keeps due within 2³¹ of the tail, however much control a side sends that sends
// nothing else. What lies further back than the ring is long has been dropped.
func (o *Outgoing) followDue(tail uint64) {
	const far = 1 << 30 // in time: a message is shorter than the other half
	if at := uint32(tail); at-o.due > far {
		o.due = at - Size
	}
}

// Cells hold the control messages for which the ring had no room. Data that the
// application does not read, or room that is reserved for long, may keep the ring blocked
// indefinitely, but control is handled at once, so a few cells are enough.
type Cells [Spares]cell

type cell struct {
	size  atomic.Uint64
	after atomic.Uint64 // to be read after the ring up to this position
	data  [MaxControl]byte
}

// Record headers: length in the low half, kind in the high half.
const (
	headerSize = 8

	kindMessage = 1 << 32
	kindPad     = 2 << 32 // length bytes, header included, to skip
	lengthMask  = 1<<32 - 1
)

// recordSize is the length in bytes of the record of a message of n bytes.
func recordSize(n int) uint64 { return uint64(headerSize + (n+7)&^7) }

// The functions below are the only places where the ring's bytes turn into words. The mask
// keeps any position aligned and inside the ring.

// header reads a record's header, once: the peer may change it at any time.
func header(mem *[Size]byte, at uint64) uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(&mem[at&mask&^7])).Load()
}

// putHeader writes a record's header. The tail's atomic store publishes it.
func putHeader(mem *[Size]byte, at, h uint64) {
	*(*uint64)(unsafe.Pointer(&mem[at&mask&^7])) = h
}

// message returns the n bytes behind the header at a position.
func message(mem *[Size]byte, at uint64, n int) []byte {
	off := at&mask + headerSize
	return mem[off : off+uint64(n) : off+uint64(n)]
}
