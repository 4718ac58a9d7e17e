package shm

import (
	"runtime"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/session"
)

// The writer's side of a ring.
//
// Positions count bytes for ever; a position's low bits are the offset in the
// ring, the others the lap. The writer uses the ring up to a limit that starts
// small, so that an idle connection has committed little memory. Where the
// limit is reached a pad record sends the reader to the start of the next lap,
// and so it does when the ring is empty and the writer has come some way: light
// traffic then stays in the same few cached pages.

const (
	ringStart = 64 << 10 // the first limit
	rewindAt  = 16 << 10 // start again here if the ring is empty
	rewindTry = 4 << 10  // looking costs a cache miss, so once per this many bytes

	// fragment is the least that data gets when it asked for more: smaller
	// pieces at the edge of a full ring cost more than waiting.
	fragment = 4 << 10

	// ringSure is the limit that a ring reaches whatever the budget says: two
	// programs that each write 256 KiB, in the smallest messages, before either
	// reads would otherwise wait for each other for ever where they do not over
	// TCP. The largest message fits from 256 KiB on.
	ringSure = 512 << 10
)

// defaultBudget is how many bytes the rings of this process may grow by, all
// connections together, beyond ringSure, which a ring gets in any case.
const defaultBudget = 256 << 20

var (
	budget     atomic.Int64 // defaultBudget, but in tests
	budgetUsed atomic.Int64
)

func init() { budget.Store(defaultBudget) }

// grabs says who uses a ring that has grown: nobody, the sender between
// Reserve and Commit, or the janitor that gives its pages back.
const (
	grabNobody = iota
	grabSender
	grabJanitor
)

type sender struct {
	control *ringControl
	notes   *notes
	ring    *[ringSize]byte
	max     uint64 // of limit

	tail      uint64 // where the next record goes
	published uint64 // control.tail
	head      uint64 // control.head as last read and checked
	spares    *[spares]spareCell
	spareTail uint64 // cells published
	spareHead uint64 // control.spareHead as last read and checked
	room      int    // of the Reserve under way, in bytes
	lapEnd    uint64 // the offset up to which the last lap was used
	spare     bool   // and it is a spare cell
	data      bool   // it is for more than control
	tryRewind uint64 // the next position at which to look for an empty ring

	limit  atomic.Uint64 // grows here, shrinks in the janitor under grab
	pages  atomic.Uint64 // likewise: how much of the ring may have memory, limit at least
	grab   atomic.Uint32 // needed once pages is above ringStart
	wanted atomic.Uint64 // the head position that makes room, for Arm

	idleTail uint64 // the janitor's: published when it last looked, at first neverLooked
}

// neverLooked is no position: a new ring, which may have another's memory, is not idle yet
// when the janitor first looks.
const neverLooked = ^uint64(0)

// Reserve implements session.Endpoint.
func (e *endpoint) Reserve(least, most int, control bool) []byte {
	s := &e.send
	s.room, s.spare, s.data = 0, false, !control
	if state := e.theirs.Load(); state != stateOpen {
		e.peerState(state)
	}
	if e.err.Load() != nil {
		return nil
	}
	if s.pages.Load() > ringStart && s.grab.Load() != grabSender && !s.grab.CompareAndSwap(grabNobody, grabSender) {
		return nil // the janitor wakes us
	}
	n := s.find(e, least, most)
	if n == 0 && control && least <= session.MaxControl {
		if b := s.spareCell(e); b != nil {
			s.room = min(most, len(b))
			s.spare = true
			return b[:s.room:s.room]
		}
	}
	if n == 0 {
		if s.tail != s.published {
			e.publish() // a pad that the reader has to pass before there is room
		}
		s.block()
		e.ungrab()
		return nil
	}
	s.room = n
	off := s.tail&ringMask + headerSize
	return s.ring[off : off+uint64(n) : off+uint64(n)]
}

// Commit implements session.Endpoint.
func (e *endpoint) Commit(n int) {
	s := &e.send
	if n > s.room {
		panic("shm: Commit of more than Reserve gave")
	}
	s.room = 0
	if s.spare {
		e.commitSpare(n)
		return
	}
	putHeader(s.ring, s.tail, kindMessage|uint64(n))
	s.tail += uint64(headerSize + align8(n))
	if s.data {
		s.notes.due = uint32(s.tail)
	}
	e.publish()
	e.ungrab() // after: to the janitor a record that is not published is no record
}

func (e *endpoint) ungrab() {
	if e.send.grab.Load() == grabSender {
		e.send.grab.Store(grabNobody)
	}
}

// publish shows the reader all records, and wakes it if it sleeps.
func (e *endpoint) publish() {
	s := &e.send
	s.published = s.tail
	s.control.tail.Store(s.tail)
	e.wakeReader()
}

func (e *endpoint) wakeReader() {
	s := &e.send
	if s.control.sleep.Load() != 0 && s.control.sleep.Swap(0) != 0 {
		e.link.ring(e.slot.number, session.RecvReady)
	}
}

// find makes room at tail and gives its size in bytes, header not counted,
// or 0.
func (s *sender) find(e *endpoint, least, most int) int {
	need, want := uint64(headerSize+align8(least)), uint64(headerSize+align8(most))
	ahead, behind := s.free()
	rewind := s.tail >= s.tryRewind && s.tail&ringMask >= rewindAt
	if ahead < want || rewind {
		if !s.refresh(e) {
			return 0
		}
		ahead, behind = s.free()
		if rewind {
			s.tryRewind = s.tail + rewindTry
			if s.head == s.tail && behind >= want {
				s.wrap()
				ahead, behind = s.free()
			}
		}
	}
	enough := max(need, min(want, fragment))
	for max(ahead, behind) < enough && (s.leap(enough) || s.grow(e)) {
		ahead, behind = s.free()
	}
	if ahead < want && (behind >= want || ahead < enough && behind >= enough) {
		s.wrap()
		ahead = behind
	}
	if ahead < enough {
		return 0
	}
	return min(int(ahead)-headerSize, most)
}

// spareCell is the next free cell's room, nil if there is none.
func (s *sender) spareCell(e *endpoint) []byte {
	h := s.control.spareHead.Load()
	if h < s.spareHead || h > s.spareTail {
		e.violation("spare head %d outside %d to %d", h, s.spareHead, s.spareTail)
		return nil
	}
	s.spareHead = h
	if s.spareTail-h == spares {
		return nil
	}
	return s.spares[s.spareTail%spares].data[:]
}

// commitSpare shows the reader a cell. It waits there until all that is
// published in the ring before has been seen: messages stay in order.
func (e *endpoint) commitSpare(n int) {
	s := &e.send
	c := &s.spares[s.spareTail%spares]
	c.size.Store(uint64(n))
	if s.tail != s.published {
		e.publish() // a pad
	}
	c.after.Store(s.published)
	s.spareTail++
	e.ungrab()
	s.control.spareTail.Store(s.spareTail)
	e.wakeReader()
}

// free is the room in bytes straight ahead, and the room at the start of the
// ring, if the writer may go there. A pad fits everywhere.
func (s *sender) free() (ahead, behind uint64) {
	off, head := s.tail&ringMask, s.head&ringMask
	switch {
	case s.sameLap():
		return less(s.limit.Load(), off+headerSize), less(head, headerSize)
	case off < head: // behind the reader, who may be where the ring has been given back
		return less(min(head, s.limit.Load()), off+headerSize), 0
	}
	// The ring has grown, and the reader is a lap back below this.
	return less(s.limit.Load(), off+headerSize), 0
}

// less is a-b, or 0 where that is negative.
func less(a, b uint64) uint64 {
	if a < b {
		return 0
	}
	return a - b
}

func (s *sender) sameLap() bool { return s.tail/ringSize == s.head/ringSize }

// wrap goes on at the start of the ring.
func (s *sender) wrap() {
	off := s.tail & ringMask
	s.lapEnd = off + headerSize
	s.skip(ringSize - off)
}

// skip leaves n bytes out.
func (s *sender) skip(n uint64) {
	putHeader(s.ring, s.tail, kindPad|n)
	s.tail += n
}

// refresh reads how far the reader has come.
func (s *sender) refresh(e *endpoint) bool {
	h := s.control.head.Load()
	if h == s.head {
		return true
	}
	if h < s.head || h > s.published || h%8 != 0 {
		e.violation("head %d outside %d to %d", h, s.head, s.published)
		return false
	}
	s.head = h
	return true
}

// leap takes a writer that has come up behind the reader to where the lap that
// is being read ends: beyond that there is room, if the limit has grown since.
// What it leaps over is lost for this lap, so it has to gain a good deal.
func (s *sender) leap(need uint64) bool {
	off, limit := s.tail&ringMask, s.limit.Load()
	if s.sameLap() || off > s.head&ringMask || s.lapEnd+max(need+headerSize, limit/4) > limit {
		return false
	}
	s.skip(s.lapEnd - off)
	return true
}

// grow doubles the limit, within the budget from ringSure on.
func (s *sender) grow(e *endpoint) bool {
	old := s.limit.Load()
	to := min(2*old, s.max)
	if to <= old {
		return false
	}
	more := int64(max(to, s.pages.Load()) - s.pages.Load())
	if budgetUsed.Add(more) > budget.Load() && old >= ringSure ||
		s.grab.Load() != grabSender && !s.grab.CompareAndSwap(grabNobody, grabSender) {
		budgetUsed.Add(-more)
		return false
	}
	s.limit.Store(to)
	if more > 0 {
		s.pages.Store(to)
		e.link.ringGrew()
	}
	return true
}

// inherit takes over what an earlier connection has left in the ring, or gives it back
// where the budget is exceeded.
func (s *sender) inherit(left uint64) {
	if left > ringStart && budgetUsed.Load() > budget.Load() && giveBack(s.ring, left) {
		left = 0
	}
	s.pages.Store(max(left, ringStart))
}

// giveBack frees the memory of a ring that nobody reads, of which the budget has counted
// pages bytes.
func giveBack(ring *[ringSize]byte, pages uint64) bool {
	if unix.Madvise(ring[:], unix.MADV_REMOVE) != nil {
		return false
	}
	budgetUsed.Add(-int64(pages - ringStart))
	return true
}

// block remembers that there was no room, and how far the reader has to come
// before it is worth another look: some way, but no further than to where the
// writer finds room for the largest message, or all there is.
func (s *sender) block() {
	at := s.head + s.limit.Load()/8
	if lap := (s.head | ringMask) + 1; !s.sameLap() {
		if s.tail&ringMask < s.head&ringMask {
			at = min(at, lap) // there the room up to the limit opens
		} else {
			at = lap + headerSize + messageMax
		}
	}
	s.wanted.Store(min(s.published, at))
}

// shrink gives the pages of a ring back that was empty for a while. The
// janitor calls it. It says whether it has to come again.
func (s *sender) shrink(e *endpoint) (again bool) {
	if s.pages.Load() <= ringStart {
		return false
	}
	tail := s.control.tail.Load()
	if tail != s.idleTail || s.control.head.Load() != tail {
		s.idleTail = tail
		return true
	}
	if !s.grab.CompareAndSwap(grabNobody, grabJanitor) {
		return true
	}
	empty := s.control.tail.Load() == tail
	if empty && giveBack(s.ring, s.pages.Load()) {
		s.limit.Store(ringStart)
		s.pages.Store(ringStart)
	}
	s.grab.Store(grabNobody)
	e.wake(session.SendReady) // Reserve may have found the janitor here
	return !empty
}

// close keeps the janitor out, for good; it may be punching holes right now. It says
// how much of the ring may have memory.
func (s *sender) close() (pages uint64) {
	for s.grab.Load() != grabSender && !s.grab.CompareAndSwap(grabNobody, grabSender) {
		runtime.Gosched()
	}
	return s.pages.Load()
}
