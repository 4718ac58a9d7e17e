package shm

import (
	"runtime"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/session"
)

// The writer's side of a ring.
//
// Positions only grow. A position's low bits are the offset in the ring, the others
// the lap. The writer uses the ring up to a limit that starts small, so that an idle
// connection commits little memory. At the limit, a pad record sends the reader to
// the start of the next lap. So does one when the ring is empty and the writer has
// come some way, which keeps light traffic in the same few cached pages.

const (
	ringStart = 64 << 10 // the first limit
	rewindAt  = 16 << 10 // start again here if the ring is empty
	rewindTry = 4 << 10  // bytes between looks for an empty ring: each is a cache miss

	// fragment is the least room that Reserve gives when more was asked for:
	// smaller pieces at the edge of a full ring cost more than waiting.
	fragment = 4 << 10

	// ringSure is the limit that a ring may reach whatever the budget says. Without
	// it two programs that each write 256 KiB in the smallest messages before they
	// read, which works over TCP, would wait for each other for ever. The largest
	// message fits from 256 KiB on.
	ringSure = 512 << 10
)

// defaultBudget is by how many bytes all rings that this process writes may grow beyond
// ringStart. A ring grows to ringSure even when the budget is used up, and counts.
const defaultBudget = 256 << 20

var (
	budget     atomic.Int64 // defaultBudget except in tests
	budgetUsed atomic.Int64
)

func init() { budget.Store(defaultBudget) }

// Who uses a ring that has grown: nobody, the sender between Reserve and Commit (and for
// good after close), or the janitor while it gives pages back.
const (
	grabNobody = iota
	grabSender
	grabJanitor
)

type sender struct {
	shared *ringControl
	notes  *notes
	ring   *[ringSize]byte
	max    uint64 // upper bound of limit

	tail      uint64 // where the next record goes
	published uint64 // control.tail
	head      uint64 // control.head as last read and checked
	spares    *[spares]spareCell
	spareTail uint64 // cells published
	spareHead uint64 // control.spareHead as last read and checked
	room      int    // bytes that Reserve gave; 0: there is no reservation of data
	control   int    // bytes that ReserveControl gave
	spare     bool   // … in a spare cell
	lapEnd    uint64 // the offset up to which the last lap was used
	tryRewind uint64 // the next position at which to look for an empty ring

	limit  atomic.Uint64 // the sender raises it; the janitor lowers it under grab
	pages  atomic.Uint64 // likewise: how much of the ring may have memory, at least limit
	grab   atomic.Uint32 // needed once pages is above ringStart
	wanted atomic.Uint64 // the head position that makes room, for Arm

	idleTail uint64 // the janitor's: control.tail when it last looked, or neverLooked
}

// neverLooked is not a valid position, so that the janitor's first look never finds a new
// ring idle: it may have inherited memory.
const neverLooked = ^uint64(0)

// Reserve implements session.Endpoint.
func (e *endpoint) Reserve(least, most int) []byte {
	s := &e.send
	s.room, s.control = 0, 0
	n := e.find(least, most)
	if n == 0 {
		return nil
	}
	s.room = n
	return s.at(n)
}

// Commit implements session.Endpoint.
func (e *endpoint) Commit(n int) {
	s := &e.send
	if n > s.room {
		panic("shm: Commit of more than Reserve gave")
	}
	s.room = 0
	if n == 0 {
		e.abandon()
		return
	}
	s.put(n)
	s.notes.due = uint32(s.tail)
	e.publish()
	e.ungrab() // last: the janitor does not see a record until it is published
}

// abandon gives the room of a reservation back. A pad before it stays: the janitor must
// not find it unpublished.
func (e *endpoint) abandon() {
	if s := &e.send; s.tail != s.published {
		e.publish()
	}
	e.ungrab()
}

// ReserveControl implements session.Endpoint. While room of the ring is reserved for data,
// only the spare cells are left.
func (e *endpoint) ReserveControl(n int) []byte {
	s := &e.send
	s.control = 0
	b := []byte(nil)
	if s.room == 0 && e.find(n, n) != 0 {
		b = s.at(n)
	} else if e.err.Load() == nil && n <= session.MaxControl {
		b = s.spareCell(e)
		s.spare = true
	}
	if b == nil {
		return nil
	}
	s.control = n
	return b[:n:n]
}

// CommitControl implements session.Endpoint.
func (e *endpoint) CommitControl(n int) {
	s := &e.send
	if n > s.control {
		panic("shm: CommitControl of more than ReserveControl gave")
	}
	s.control = 0
	if s.spare {
		s.spare = false
		e.commitSpare(n)
		return
	}
	s.put(n)
	s.notes.follow(s.tail)
	e.publish()
	e.ungrab()
}

// find makes room for a record and returns its size in bytes without the header, or 0.
func (e *endpoint) find(least, most int) int {
	s := &e.send
	s.spare = false
	if state := e.theirs.load(); state != stateOpen {
		e.peerState(state)
	}
	if e.err.Load() != nil {
		return 0
	}
	if s.pages.Load() > ringStart && s.grab.Load() != grabSender && !s.grab.CompareAndSwap(grabNobody, grabSender) {
		return 0 // the janitor wakes the session
	}
	n := s.find(e, least, most)
	if n == 0 {
		if s.tail != s.published {
			e.publish() // a pad, which the reader must pass before there is room
		}
		s.block()
		e.ungrab()
	}
	return n
}

// at returns the room of n bytes for a record's message.
func (s *sender) at(n int) []byte {
	off := s.tail&ringMask + headerSize
	return s.ring[off : off+uint64(n) : off+uint64(n)]
}

// put ends a record with a message of n bytes.
func (s *sender) put(n int) {
	putHeader(s.ring, s.tail, kindMessage|uint64(n))
	s.tail += uint64(headerSize + align8(n))
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
	s.shared.tail.Store(s.tail)
	e.wakeReader()
}

func (e *endpoint) wakeReader() {
	s := &e.send
	if s.shared.sleep.Load() != 0 && s.shared.sleep.Swap(0) != 0 {
		e.link.ring(e.slot.number, session.RecvReady)
	}
}

// find makes room at tail and returns its size in bytes without the header, or 0.
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

// spareCell returns the memory of the next free cell, or nil.
func (s *sender) spareCell(e *endpoint) []byte {
	h := s.shared.spareHead.Load()
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

// commitSpare shows the reader a cell. To keep the order, the reader takes it only after
// everything already published in the ring.
func (e *endpoint) commitSpare(n int) {
	s := &e.send
	c := &s.spares[s.spareTail%spares]
	c.size.Store(uint64(n))
	if s.tail != s.published {
		e.publish() // a pad
	}
	c.after.Store(s.published)
	s.spareTail++
	if s.room == 0 {
		e.ungrab()
	}
	s.shared.spareTail.Store(s.spareTail)
	e.wakeReader()
}

// free returns the room in bytes straight ahead, and that at the start of the ring if the
// writer may go there. There is always room for a pad.
func (s *sender) free() (ahead, behind uint64) {
	off, head := s.tail&ringMask, s.head&ringMask
	switch {
	case s.sameLap():
		return less(s.limit.Load(), off+headerSize), less(head, headerSize)
	case off < head: // behind the reader, which may be above a limit that has shrunk
		return less(min(head, s.limit.Load()), off+headerSize), 0
	}
	// The ring has grown. The reader is in the previous lap, at a lower offset.
	return less(s.limit.Load(), off+headerSize), 0
}

// less is a-b, or 0 if that is negative.
func less(a, b uint64) uint64 {
	if a < b {
		return 0
	}
	return a - b
}

func (s *sender) sameLap() bool { return s.tail/ringSize == s.head/ringSize }

// wrap continues at the start of the ring.
func (s *sender) wrap() {
	off := s.tail & ringMask
	s.lapEnd = off + headerSize
	s.skip(ringSize - off)
}

// skip covers n bytes with a pad.
func (s *sender) skip(n uint64) {
	putHeader(s.ring, s.tail, kindPad|n)
	s.tail += n
}

// refresh reads how far the reader has come. It returns false if that cannot be.
func (s *sender) refresh(e *endpoint) bool {
	h := s.shared.head.Load()
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

// leap moves a writer that has caught up with the reader to the end of the lap that is
// being read: if the limit has grown since, there is room beyond. What it leaps over is
// lost for this lap, so it is done only for a good gain.
func (s *sender) leap(need uint64) bool {
	off, limit := s.tail&ringMask, s.limit.Load()
	if s.sameLap() || off > s.head&ringMask || s.lapEnd+max(need+headerSize, limit/4) > limit {
		return false
	}
	s.skip(s.lapEnd - off)
	return true
}

// grow doubles the limit. From ringSure on it needs the budget's consent.
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

// inherit takes over the memory that an earlier connection left in the ring, or gives it
// back if the budget is exceeded.
func (s *sender) inherit(left uint64) {
	if left > ringStart && budgetUsed.Load() > budget.Load() && giveBack(s.ring, left) {
		left = 0
	}
	s.pages.Store(max(left, ringStart))
}

// giveBack frees the memory of a ring with nothing left to read. pages is how much of it
// may have memory, which the budget has counted.
func giveBack(ring *[ringSize]byte, pages uint64) bool {
	if unix.Madvise(ring[:], unix.MADV_REMOVE) != nil {
		return false
	}
	budgetUsed.Add(-int64(pages - ringStart))
	return true
}

// block notes how far the reader must come before another look for room is worthwhile:
// some way, but no further than to where there is room for the largest message, or to the
// end of what is published.
func (s *sender) block() {
	at := s.head + s.limit.Load()/8
	if lap := (s.head | ringMask) + 1; !s.sameLap() {
		if s.tail&ringMask < s.head&ringMask {
			at = min(at, lap) // from there on there is room up to the limit
		} else {
			at = lap + headerSize + messageMax
		}
	}
	s.wanted.Store(min(s.published, at))
}

// shrink gives back the pages of a ring that has been empty since the last look. The
// janitor calls it. It reports whether it has to run again.
func (s *sender) shrink(e *endpoint) (again bool) {
	if s.pages.Load() <= ringStart {
		return false
	}
	tail := s.shared.tail.Load()
	if tail != s.idleTail || s.shared.head.Load() != tail {
		s.idleTail = tail
		return true
	}
	if !s.grab.CompareAndSwap(grabNobody, grabJanitor) {
		return true
	}
	empty := s.shared.tail.Load() == tail
	if empty && giveBack(s.ring, s.pages.Load()) {
		s.limit.Store(ringStart)
		s.pages.Store(ringStart)
	}
	s.grab.Store(grabNobody)
	e.wake(session.SendReady) // Reserve may have found the janitor here
	return !empty
}

// close keeps the janitor out for good, after waiting for one at work.
func (s *sender) close() {
	for s.grab.Load() != grabSender && !s.grab.CompareAndSwap(grabNobody, grabSender) {
		runtime.Gosched()
	}
}
