package shm

import (
	"sync/atomic"
	"unsafe"

	"github.com/sanconn/san/session"
)

// The layout of a segment, the same on both sides and part of the protocol
// version:
//
//	bell        2 × bellSize        (used in segment 0 only)
//	control     slots × controlSize
//	rings       slots × 2 × ringSize, from a multiple of ringAlign on
//
// Direction 0 is from the dialing process to the accepting one. Words that
// different sides write lie on cache lines of their own, two apart, because
// processors fetch lines in pairs.
const (
	pageSize = 4096
	ringSize = 4 << 20 // addresses only: memory is committed when touched
	ringMask = ringSize - 1

	controlSize = 3 * pageSize // of which idle connections touch one
	bellSize    = 2 * pageSize
	ringAlign   = 64 << 10 // the largest page of Linux: a ring's pages are given back alone

	firstSlots = 16    // of a link's first segment; each further one doubles what there is
	mostSlots  = 256   // of one segment
	linkSlots  = 16384 // of a link: what the bell's bitmap holds

	exposures = 16 // per connection and side
)

// ringControl steers one direction of a connection.
type ringControl struct {
	tail      atomic.Uint64 // writer: bytes published
	spareTail atomic.Uint64 // writer: spare cells published
	_         [112]byte
	head      atomic.Uint64 // reader: bytes given back
	spareHead atomic.Uint64 // reader: spare cells given back
	_         [112]byte
	sleep     atomic.Uint32 // reader asks for the bell when tail moves
	_         [124]byte
	want      atomic.Uint64 // writer asks for the bell when head reaches this; 0: it does not
	_         [120]byte
}

// A side's state. Any other than open also says that the side no longer
// touches the slot.
const (
	stateOpen    = 0
	stateClosed  = 1 // in order
	stateAborted = 2
)

type sideState struct {
	v atomic.Uint32
	_ [124]byte
}

// notes are a side's word on what is unread, see unread_linux.go. Its sender and its
// receiver run on different processors.
type notes struct {
	due  uint32 // as a writer
	_    [60]byte
	done uint32 // as a reader
	_    [60]byte
}

// exposure is one range of memory that a side lets the other read.
type exposure struct {
	key  atomic.Uint64 // as in the Descriptor; 0: free
	addr atomic.Uint64
	len  atomic.Uint64
	word atomic.Uint64 // see remote_linux.go
	_    [32]byte
}

// spareCell holds a control message for which the ring had no room. Data that
// the application does not read keeps the ring full for as long as it likes,
// but control messages are dealt with at once, so a few cells are enough.
type spareCell struct {
	size  atomic.Uint64
	after atomic.Uint64 // the ring position at which it was committed
	data  [session.MaxControl]byte
}

const spares = 2 * session.ControlReserve

// slotControl steers one connection.
type slotControl struct {
	ring    [2]ringControl
	state   [2]sideState
	notes   [2]notes
	exposed [2][exposures]exposure
	spare   [2][spares]spareCell
}

// bell is one direction's doorbell: which slots have news of which kind.
type bell struct {
	asleep atomic.Uint32 // the waiter has to be woken
	_      [124]byte
	sum    [bellWords / 64]atomic.Uint64 // which words of bits have any
	_      [pageSize - 128 - bellWords/8]byte
	bits   [bellWords]atomic.Uint64 // two per slot
}

const bellWords = 2 * linkSlots / 64

// The Go structs must have exactly the sizes of the layout.
var (
	_ [controlSize - unsafe.Sizeof(slotControl{})]byte
	_ [bellSize - unsafe.Sizeof(bell{})]byte
	_ [unsafe.Sizeof(bell{}) - bellSize]byte
)

// Record headers, in the ring before each message, little endian:
// length in the low half, kind in the high half.
const (
	headerSize = 8

	kindMessage = 1 << 32
	kindPad     = 2 << 32 // length bytes, header included, to skip
	lengthMask  = 1<<32 - 1

	// messageMax is the publishing step of a stream: 16 to 64 KiB keep both
	// processes busy without a cache line bouncing for every few bytes.
	messageMax = 64 << 10
)

// ringsAt is where a segment's rings begin.
func ringsAt(slots int) int {
	return (2*bellSize + slots*controlSize + ringAlign - 1) &^ (ringAlign - 1)
}

// segmentSize may be more than an int of 32 bits has room for.
func segmentSize(slots int) int64 { return int64(ringsAt(slots)) + int64(slots)*2*ringSize }

// nextSegment is how many slots a link's next segment has, by how many it has; 0: it
// gets no more. Both ends hold to it: a peer that sent smaller ones could have this
// process map more of them than the kernel lets it (vm.max_map_count).
func nextSegment(have int) int {
	if have == 0 {
		return firstSlots
	}
	return min(have, mostSlots, linkSlots-have)
}

func align8(n int) int { return (n + 7) &^ 7 }

// The three functions below are the only places where mapped memory turns into
// typed pointers. Each offset is computed from local numbers and lies inside
// the mapping, whose size newMapping has checked.

func (m mapping) bell(dir int) *bell {
	return (*bell)(unsafe.Pointer(&m.mem[dir*bellSize]))
}

func (m mapping) control(i int) *slotControl {
	return (*slotControl)(unsafe.Pointer(&m.mem[2*bellSize+i*controlSize]))
}

func (m mapping) ring(i, dir int) *[ringSize]byte {
	return (*[ringSize]byte)(m.mem[ringsAt(m.slots)+(2*i+dir)*ringSize:])
}

// header reads a record's header once: the peer may change it at any time.
// off is a multiple of 8 inside the ring.
func header(ring *[ringSize]byte, off uint64) uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(&ring[off&ringMask&^7])).Load()
}

// putHeader writes one. It is published by the tail's atomic store.
func putHeader(ring *[ringSize]byte, off, h uint64) {
	*(*uint64)(unsafe.Pointer(&ring[off&ringMask&^7])) = h
}
