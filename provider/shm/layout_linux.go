package shm

import (
	"sync/atomic"
	"unsafe"

	"github.com/sanconn/san/provider/shm/internal/ring"
	"github.com/sanconn/san/session"
)

// The layout of a segment, the same on both sides and part of the protocol
// version:
//
//	bell        2 × bellSize        (used in segment 0 only)
//	control     slots × controlSize
//	rings       slots × 2 × ring.Size, from a multiple of ringAlign on
//
// Direction 0 is from the dialing process to the accepting one.
const (
	pageSize = 4096

	controlSize = 3 * pageSize // an idle connection touches only the first page
	bellSize    = 2 * pageSize
	ringAlign   = 64 << 10 // Linux's largest base page: rings share none, so each can be given back

	firstSlots = 16    // in a link's first segment; each further segment doubles the total
	mostSlots  = 256   // in one segment
	linkSlots  = 16384 // in a link: as many as the bell's bitmap holds
)

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

// slotControl steers one connection.
type slotControl struct {
	ring  [2]ring.Control
	state [2]sideState
	cells [2]ring.Cells
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

// The slot's control must fit its pages, and a bell must fill its own exactly. A ring takes
// the control messages that sessions send.
var (
	_ [ring.MaxControl - session.MaxControl]byte
	_ [ring.Spares - session.ControlReserve]byte
	_ [controlSize - unsafe.Sizeof(slotControl{})]byte
	_ [bellSize - unsafe.Sizeof(bell{})]byte
	_ [unsafe.Sizeof(bell{}) - bellSize]byte
)

// ringsAt is the offset of a segment's rings.
func ringsAt(slots int) int {
	return (2*bellSize + slots*controlSize + ringAlign - 1) &^ (ringAlign - 1)
}

// segmentSize may exceed a 32-bit int.
func segmentSize(slots int) int64 { return int64(ringsAt(slots)) + int64(slots)*2*ring.Size }

// nextSegment is how many slots the next segment of a link with have slots gets; 0 means
// that there is none. The accepting end insists on it: with smaller segments a peer could
// make it map more of them than the kernel allows (vm.max_map_count).
func nextSegment(have int) int {
	if have == 0 {
		return firstSlots
	}
	return min(have, mostSlots, linkSlots-have)
}

// The functions below are the only places where mapped memory turns into typed pointers.
// Each offset comes from local numbers, or is masked, and lies inside the mapping, which
// newMapping makes segmentSize long. (checkSegment has compared that with the file.)

func (m mapping) bell(dir int) *bell {
	return (*bell)(unsafe.Pointer(&m.mem[dir*bellSize]))
}

func (m mapping) control(i int) *slotControl {
	return (*slotControl)(unsafe.Pointer(&m.mem[2*bellSize+i*controlSize]))
}

func (m mapping) ring(i, dir int) []byte {
	at := ringsAt(m.slots) + (2*i+dir)*ring.Size
	return m.mem[at : at+ring.Size : at+ring.Size]
}
