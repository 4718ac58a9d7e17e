package shm

import (
	"sync/atomic"
	"unsafe"

	"github.com/sanconn/san/provider/shm/internal/ring"
	"github.com/sanconn/san/session"
)

// The layout of a half of a segment, which is the memory that one side writes and the other
// only reads. It is the same on both sides and part of the protocol version:
//
//	bell        bellSize            (used in the first segment only)
//	control     slots × controlSize
//	cells       slots × ring.Cells
//	rings       slots × ring.Size, from a multiple of ringAlign on
const (
	pageSize = 4096

	controlSize = 1024 // an idle connection touches no more, beside its ring
	bellSize    = 33 * pageSize
	ringAlign   = 64 << 10 // Linux's largest base page: rings share none, so each can be given back

	firstSlots = 16    // in a link's first segment; each further segment doubles the total
	mostSlots  = 256   // in one segment
	linkSlots  = 16384 // in a link: as many as the bell has room for
)

// A side's state. Closed and aborted are final; then the side no longer touches the slot, unless
// it is held: the session has lent reserved room, or kept messages, to the application.
const (
	stateOpen    = 0
	stateClosed  = 1 // in order
	stateAborted = 2
	stateMask    = 3

	// stateWithdrawn is the dialing side's, until it has ended; to an accepting one that has taken
	// the connection already it is open. Each side writes its state and then looks at the other's, so if the
	// dialing one finds it not taken, the accepting one finds it withdrawn, and leaves it.
	stateWithdrawn = 3

	stateHeld = 1 << 31 // with all but open, until Retire

	// Between them is which of the slot's connections it is the state of. The accepting side
	// takes that from the dialing one's state. Until it has, its state, and what else it has
	// written there, is an earlier connection's: so no connect needs a reply.
	turnUnit = stateMask + 1
	turnMask = stateHeld - turnUnit
)

type sideState struct {
	v atomic.Uint32
	_ [124]byte
}

// turn is which of the slot's connections the side has begun last.
func (s *sideState) turn() uint32 { return s.v.Load() & turnMask }

// load returns the state without held; open if the side has not begun the connection.
func (s *sideState) load(turn uint32) uint32 {
	if v := s.v.Load(); v&turnMask == turn && v&stateMask != stateWithdrawn {
		return v & stateMask
	}
	return stateOpen
}

// gaveUp reports whether the side has aborted the connection, or withdrawn it.
func (s *sideState) gaveUp(turn uint32) bool {
	v := s.v.Load()
	return v&turnMask == turn && v&stateMask >= stateAborted
}

// retired reports whether the side no longer touches the slot.
func (s *sideState) retired(turn uint32) bool {
	v := s.v.Load()
	return v&(turnMask|stateHeld) == turn && v&stateMask != stateOpen
}

// holds reports whether the side has ended the connection and may hold what has come by it.
func (s *sideState) holds(turn uint32) bool {
	return s.v.Load()&(turnMask|stateHeld) == turn|stateHeld
}

// slotControl is what one side says about one connection.
type slotControl struct {
	state sideState
	out   ring.Outgoing // of the ring in the same half
	in    ring.Incoming // of the other's
	_     [128]byte
}

// bell is one side's part in how they wake each other: that it waits, and for which slots it has
// had news. These are counts, of which the other side remembers how much it has seen.
type bell struct {
	asleep ring.Alarm
	_      [120]byte
	groups [linkSlots / groupSlots]atomic.Uint32 // news of a group of slots, to find them by
	_      [2048 - 128 - linkSlots/groupSlots*4]byte
	slots  [linkSlots]atomic.Uint64 // of each slot: two counts, by what is ready
	_      [2048]byte
}

const groupSlots = 64

// The slot's control must fit, and a bell must fill its own exactly. A ring takes the control
// messages that sessions send.
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

// halfSize fits an int of 32 bits.
func halfSize(slots int) int64 { return int64(ringsAt(slots)) + int64(slots)*ring.Size }

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
// newMapping makes halfSize long. (checkHalf has compared that with the file.)

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

// part is what one side writes of a slot.
type part struct {
	control *slotControl
	cells   *ring.Cells
	ring    []byte
}
