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
// Direction 0 is from the dialing process to the accepting one. In the control of a
// ring, words that different sides write are two cache lines apart, because processors
// fetch lines in pairs.
const (
	pageSize = 4096
	ringSize = 4 << 20 // of addresses: memory is committed when touched
	ringMask = ringSize - 1

	controlSize = 3 * pageSize // an idle connection touches only the first page
	bellSize    = 2 * pageSize
	ringAlign   = 64 << 10 // Linux's largest base page: rings share none, so each can be given back

	firstSlots = 16    // in a link's first segment; each further segment doubles the total
	mostSlots  = 256   // in one segment
	linkSlots  = 16384 // in a link: as many as the bell's bitmap holds
)

// ringControl steers one direction of a connection.
type ringControl struct {
	tail      atomic.Uint64 // writer: bytes published
	spareTail atomic.Uint64 // writer: spare cells published
	_         [112]byte
	head      atomic.Uint64 // reader: bytes freed
	spareHead atomic.Uint64 // reader: spare cells freed
	_         [112]byte
	sleep     atomic.Uint32 // reader asks for the bell when tail moves
	_         [124]byte
	want      atomic.Uint64 // writer asks for the bell when head reaches this; 0: no bell
	_         [120]byte
}

// A side's state. Any but open is final; then the side no longer touches the slot, unless
// it is held: the session has lent reserved room, or kept messages, to the application.
const (
	stateOpen    = 0
	stateClosed  = 1 // in order
	stateAborted = 2

	stateHeld = 1 << 31 // with closed and aborted, until Retire
)

type sideState struct {
	v atomic.Uint32
	_ [124]byte
}

// load returns the state without held.
func (s *sideState) load() uint32 { return s.v.Load() &^ stateHeld }

// retired reports whether the side no longer touches the slot.
func (s *sideState) retired() bool {
	v := s.v.Load()
	return v != stateOpen && v&stateHeld == 0
}

// notes are what one side records about unread data, see unread_linux.go. Its two words
// are apart because its sender and receiver run on different processors.
type notes struct {
	due  uint32 // as a writer
	_    [60]byte
	done uint32 // as a reader
	_    [60]byte
}

// spareCell holds a control message for which the ring had no room. Data that the
// application does not read may keep the ring full indefinitely, but control messages
// are handled at once, so a few cells are enough.
type spareCell struct {
	size  atomic.Uint64
	after atomic.Uint64 // to be read after the ring up to this position
	data  [session.MaxControl]byte
}

const spares = 2 * session.ControlReserve

// slotControl steers one connection.
type slotControl struct {
	ring  [2]ringControl
	state [2]sideState
	notes [2]notes
	spare [2][spares]spareCell
}

// bell is one direction's doorbell: which slots have news, and of which kind.
type bell struct {
	asleep atomic.Uint32 // the waiter must be woken
	_      [124]byte
	sum    [bellWords / 64]atomic.Uint64 // which words of bits are not zero
	_      [pageSize - 128 - bellWords/8]byte
	bits   [bellWords]atomic.Uint64 // two per slot
}

const bellWords = 2 * linkSlots / 64

// The slot's control must fit its pages, and a bell must fill its own exactly.
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

	// messageMax is how much of a stream is published at a time: 16 to 64 KiB keep
	// both processes busy without bouncing a cache line for every few bytes.
	messageMax = 64 << 10
)

// ringsAt is the offset of a segment's rings.
func ringsAt(slots int) int {
	return (2*bellSize + slots*controlSize + ringAlign - 1) &^ (ringAlign - 1)
}

// segmentSize may exceed a 32-bit int.
func segmentSize(slots int) int64 { return int64(ringsAt(slots)) + int64(slots)*2*ringSize }

// nextSegment is how many slots the next segment of a link with have slots gets; 0 means
// that there is none. The accepting end insists on it: with smaller segments a peer could
// make it map more of them than the kernel allows (vm.max_map_count).
func nextSegment(have int) int {
	if have == 0 {
		return firstSlots
	}
	return min(have, mostSlots, linkSlots-have)
}

func align8(n int) int { return (n + 7) &^ 7 }

// The functions below are the only places where mapped memory turns into typed pointers.
// Each offset comes from local numbers, or is masked, and lies inside the mapping, which
// newMapping makes segmentSize long. (checkSegment has compared that with the file.)

func (m mapping) bell(dir int) *bell {
	return (*bell)(unsafe.Pointer(&m.mem[dir*bellSize]))
}

func (m mapping) control(i int) *slotControl {
	return (*slotControl)(unsafe.Pointer(&m.mem[2*bellSize+i*controlSize]))
}

func (m mapping) ring(i, dir int) *[ringSize]byte {
	return (*[ringSize]byte)(m.mem[ringsAt(m.slots)+(2*i+dir)*ringSize:])
}

// header reads a record's header, once: the peer may change it at any time. off may be
// any position; the mask keeps it aligned and inside the ring.
func header(ring *[ringSize]byte, off uint64) uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(&ring[off&ringMask&^7])).Load()
}

// putHeader writes a record's header. The tail's atomic store publishes it.
func putHeader(ring *[ringSize]byte, off, h uint64) {
	*(*uint64)(unsafe.Pointer(&ring[off&ringMask&^7])) = h
}
