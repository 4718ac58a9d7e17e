// Package ring carries messages from one process to another through memory that both map: a Writer and
// a Reader of a ring of bytes. It knows neither connections nor sessions, makes no system calls, and
// never sleeps. What is left to do after a call, such as waking the other process, it returns as an
// Action.
//
// A ring's memory is: Size bytes for the messages; Outgoing and Incoming, the words by which the two
// sides agree; and Cells, the room for control messages that do not fit into the ring. The reader
// writes Incoming, the writer the rest. Each side need only be able to read what the other side writes,
// which may change at any time. So each side keeps its own positions, checks what it reads of the other
// side's, and reads a length once. Whatever the other process writes, no call panics, runs for ever, or
// touches memory outside the ring. At worst a call returns Broken, or messages have any content.
//
// Positions only grow. The low bits of a position are the offset in the ring, the others the lap. A
// record is a header and a message, and never crosses the end of the ring.
package ring

import (
	"sync/atomic"
	"unsafe"
)

const (
	// Size is the length of a ring in bytes of addresses. Memory is committed when it is touched.
	Size = 4 << 20
	mask = Size - 1

	// MaxMessage is the size in bytes of the largest message, and so how much of a stream is published
	// at a time: with 16 to 64 KiB both processes are busy without exchanging a cache line for every
	// few bytes.
	MaxMessage = 64 << 10

	// MaxControl is the size in bytes of the largest control message.
	MaxControl = 256

	// Spares is how many control messages have room when the ring has none.
	Spares = 16
)

// Action is a set of things that a call leaves to its caller.
type Action uint8

const (
	// Wake: the other side waits for what has happened, and must be woken.
	Wake Action = 1 << iota
	// Grew: there is memory that Shrink may give back.
	Grew
	// Broken: the other side broke the rules; Err tells how. Nothing more goes this way.
	Broken
)

// Outgoing is what a ring's writer publishes beside the messages, and Incoming what its reader
// publishes. Words that are written at different times are two cache lines apart, because processors
// fetch lines in pairs. The zero values are those of an empty ring.
type Outgoing struct {
	tail      atomic.Uint64 // bytes published
	spareTail atomic.Uint64 // cells published
	_         [112]byte
	want      Alarm // wake the writer when head reaches a place
	_         [120]byte
	due       uint32 // see Unread; the reader does not use it
	_         [124]byte
}

type Incoming struct {
	head      atomic.Uint64 // bytes freed
	spareHead atomic.Uint64 // cells freed
	_         [112]byte
	sleep     Alarm // wake the reader when tail moves
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

// Backlog returns how many bytes are published and not freed, as the two ends publish it.
func (o *Outgoing) Backlog(by *Incoming) uint64 { return o.tail.Load() - by.head.Load() }

// Unread reports, after the reader's process has died, whether it had left data unread. TCP shows that
// by a reset. Here the writer's process compares two positions, modulo 2³²:
//
//	due   the end of the last message that is not control
//	done  everything before it was dropped or released; exact, unlike head, which may
//	      lag by headBatch
//
// Both are plain stores into cache lines that nobody else touches. Atomic stores would cost a twentieth
// of a round trip for each message, and due beside the tail a fiftieth. The kernel has reported the
// death, so done is read after all stores of the dead process. due may be stored at the same moment:
// then the message counts or not, like a Write that crosses a reset. The dead process can have written
// anything to done, but done decides only how its connection ends.
func (o *Outgoing) Unread(by *Incoming) bool { return int32(o.due-by.done) > 0 }

// followDue keeps due within 2³¹ of the tail when this side sends control messages only. Messages that
// lie further back than the ring is long have been dropped.
func (o *Outgoing) followDue(tail uint64) {
	const far = 1 << 30 // soon enough, as a message is shorter than the rest of 2³¹
	if at := uint32(tail); at-o.due > far {
		o.due = at - Size
	}
}

// Cells hold control messages for which the ring has no room. Data that the application does not read,
// or room that is reserved for long, may block the ring indefinitely. Control messages are handled at
// once, so a few cells are enough.
type Cells [Spares]cell

type cell struct {
	size  atomic.Uint64
	after atomic.Uint64 // to be read after the ring's messages up to this position
	data  [MaxControl]byte
}

// Record headers: the length in the low half, the kind in the high half.
const (
	headerSize = 8

	kindMessage = 1 << 32
	kindPad     = 2 << 32 // the length is to be skipped, header included
	lengthMask  = 1<<32 - 1
)

// recordSize returns the length in bytes of the record of a message of n bytes.
func recordSize(n int) uint64 { return uint64(headerSize + (n+7)&^7) }

// The ring's bytes turn into words only in the functions below. The mask keeps any position aligned and
// inside the ring.

// header reads a record's header, once: the peer may change it at any time.
func header(mem *[Size]byte, at uint64) uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(&mem[at&mask&^7])).Load()
}

// putHeader writes a record's header. The tail's atomic store publishes it.
func putHeader(mem *[Size]byte, at, h uint64) {
	*(*uint64)(unsafe.Pointer(&mem[at&mask&^7])) = h
}

// message returns the n bytes after the header at a position.
func message(mem *[Size]byte, at uint64, n int) []byte {
	off := at&mask + headerSize
	return mem[off : off+uint64(n) : off+uint64(n)]
}
