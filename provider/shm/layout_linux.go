package shm

import (
	"sync/atomic"
	"unsafe"

	"github.com/sanconn/san/provider/shm/internal/ring"
	"github.com/sanconn/san/session"
)

// The layout of a half of a segment, the memory that one side writes and the other side only reads. It
// is the same for both sides and part of the protocol version:
//
//	bell        bellSize            (used in the first segment only)
//	control     slots × controlSize
//	cells       slots × ring.Cells
//	rings       slots × ring.Size, from a multiple of ringAlign on
const (
	pageSize = 4096

	controlSize = 1024 // an idle connection touches no more memory, beside its ring
	bellSize    = 33 * pageSize
	ringAlign   = 64 << 10 // Linux's largest base page: no page belongs to two rings, so each ring can be given back

	firstSlots = 16    // in a link's first segment; each further segment doubles the total
	mostSlots  = 256   // in one segment
	linkSlots  = 16384 // in a link: the bell has room for so many
)

// The state of a side. Closed and aborted are final. Then the side does not touch the slot any more,
// unless stateHeld is set: the session has lent reserved room, or kept messages, to the application.
const (
	stateOpen    = 0
	stateClosed  = 1 // in order
	stateAborted = 2
	stateMask    = 3

	// stateWithdrawn is a state of the dialing side, which takes the connect back. If the accepting
	// side has taken the connection, it counts as open there. Each side writes its state and then reads
	// the other's: so if the dialing side finds the connection not taken, the accepting side finds it
	// withdrawn, and leaves it.
	stateWithdrawn = 3

	stateHeld = 1 << 31 // set with all states but open, until Retire

	// The bits between are the turn: the number of the slot's connection that the state is about. The
	// accepting side takes it from the dialing side's state. Until then its state, and all that it has
	// written in the slot, belong to an earlier connection. So a connect needs no reply.
	turnUnit = stateMask + 1
	turnMask = stateHeld - turnUnit
)

type sideState struct {
	v atomic.Uint32
	_ [124]byte
}

// turn returns the turn of the connection that the side has begun last.
func (s *sideState) turn() uint32 { return s.v.Load() & turnMask }

// load returns the state without held, or stateOpen if the side has not begun this connection.
func (s *sideState) load(turn uint32) uint32 {
	if v := s.v.Load(); v&turnMask == turn && v&stateMask != stateWithdrawn {
		return v & stateMask
	}
	return stateOpen
}

// gaveUp reports whether the side has aborted or withdrawn the connection.
func (s *sideState) gaveUp(turn uint32) bool {
	v := s.v.Load()
	return v&turnMask == turn && v&stateMask >= stateAborted
}

// retired reports whether the side does not touch the slot any more for this connection.
func (s *sideState) retired(turn uint32) bool {
	v := s.v.Load()
	return v&(turnMask|stateHeld) == turn && v&stateMask != stateOpen
}

// holds reports whether the side has ended the connection and may still hold messages of it.
func (s *sideState) holds(turn uint32) bool {
	return s.v.Load()&(turnMask|stateHeld) == turn|stateHeld
}

// slotControl is what one side tells about one connection.
type slotControl struct {
	state sideState
	out   ring.Outgoing // for the ring in the same half
	in    ring.Incoming // for the ring in the other half
	_     [128]byte
}

// bell is what one side tells for wake-ups: whether it sleeps, and for which slots it has had news. The
// news are counts; the other side remembers how far it has seen them.
type bell struct {
	asleep ring.Alarm
	_      [120]byte
	groups [linkSlots / groupSlots]atomic.Uint32 // for each group of slots, so that the other side finds the slots
	_      [2048 - 128 - linkSlots/groupSlots*4]byte
	slots  [linkSlots]atomic.Uint64 // for each slot two counts: something to receive, room to send
	_      [2048]byte
}

const groupSlots = 64

// The sizes that must match: a slot's control and a bell fill their places exactly, and a ring takes
// all control messages of a session.
var (
	_ [ring.MaxControl - session.MaxControl]byte
	_ [ring.Spares - session.ControlReserve]byte
	_ [controlSize - unsafe.Sizeof(slotControl{})]byte
	_ [unsafe.Sizeof(slotControl{}) - controlSize]byte
	_ [bellSize - unsafe.Sizeof(bell{})]byte
	_ [unsafe.Sizeof(bell{}) - bellSize]byte
)

const cellsSize = int(unsafe.Sizeof(ring.Cells{}))

// ringsAt is the offset of a half's rings.
func ringsAt(slots int) int {
	return (bellSize + slots*(controlSize+cellsSize) + ringAlign - 1) &^ (ringAlign - 1)
}

// halfSize returns the size in bytes of a half, which fits an int of 32 bits.
func halfSize(slots int) int64 { return int64(ringsAt(slots)) + int64(slots)*ring.Size }

// nextSegment returns the number of slots of the next segment of a link that has have slots; 0: there
// is none. The accepting end insists on it, because with smaller segments a peer could make it map more
// than the kernel allows (vm.max_map_count).
func nextSegment(have int) int {
	if have == 0 {
		return firstSlots
	}
	return min(have, mostSlots, linkSlots-have)
}

// Mapped memory turns into typed pointers only in the functions below. Each offset is calculated from
// local numbers, or masked, and lies inside the mapping, which newMapping makes halfSize long.
// (checkHalf has compared halfSize with the file.)

func (m mapping) bell() *bell { return (*bell)(unsafe.Pointer(&m.mem[0])) }

func (m mapping) part(i int) part {
	cells := bellSize + m.slots*controlSize + i*cellsSize
	at := ringsAt(m.slots) + i*ring.Size
	return part{
		(*slotControl)(unsafe.Pointer(&m.mem[bellSize+i*controlSize])),
		(*ring.Cells)(unsafe.Pointer(&m.mem[cells])),
		m.mem[at : at+ring.Size : at+ring.Size],
	}
}

// part is one side's memory of a slot.
type part struct {
	control *slotControl
	cells   *ring.Cells
	ring    []byte
}
