package shm

import (
	"slices"
	"sync"
	"sync/atomic"

	"github.com/sanconn/san/provider/shm/internal/ring"
)

// slot is where a connection is, in both halves of a segment. The dialing end hands slots out,
// and reuses one only when both sides have retired from it.
type slot struct {
	number int
	own    part
	peers  part
	turn   atomic.Uint32            // which connection it is at, as in sideState
	ep     atomic.Pointer[endpoint] // until it retires
	pages  cachedPages              // of the ring that this end writes

	asked   bool // the peer to take it, which it may refuse; at the dialing end, guarded by the table's mu, as is
	refused bool // … and it has: so it has never had it
	charged bool // to the peer's user, until the link's end; at the accepting end, guarded by the link's mu
}

// slotTable holds the slots of a link, and at the dialing end which of them are free.
type slotTable struct {
	all    atomic.Pointer[[]*slot] // grows by copying
	memory ring.Share              // for the rings that this end writes

	mu       sync.Mutex // guards what follows
	segments []segment
	free     []*slot
	leaving  []*slot // this end is done, the peer may not be
}

func (t *slotTable) init() { t.all.Store(new([]*slot)) }

func (t *slotTable) list() []*slot { return *t.all.Load() }

// at returns a slot, nil if there is none with this number.
func (t *slotTable) at(number uint32) *slot {
	if list := t.list(); int64(number) < int64(len(list)) {
		return list[number]
	}
	return nil
}

// add adds a segment's slots, as free ones at the dialing end. One goroutine at a time adds.
func (t *slotTable) add(m segment, dialing bool) {
	old := t.list()
	list := append(make([]*slot, 0, len(old)+m.own.slots), old...)
	for i := range m.own.slots {
		list = append(list, &slot{number: len(list), own: m.own.part(i), peers: m.peers.part(i)})
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.segments = append(t.segments, m)
	t.all.Store(&list)
	if dialing {
		for i := len(list) - 1; i >= len(old); i-- { // so that the first is taken first
			t.free = append(t.free, list[i])
		}
	}
}

// allocate returns a slot that neither side uses, nil if there is none.
func (t *slotTable) allocate() *slot {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.reapLocked(reapLook)
	if len(t.free) == 0 {
		t.reapLocked(len(t.leaving))
	}
	n := len(t.free)
	if n == 0 {
		return nil
	}
	s := t.free[n-1]
	t.free = t.free[:n-1]
	return s
}

// noteAsked notes that a connect is about to be sent.
func (t *slotTable) noteAsked(s *slot) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s.asked = true
}

// noteRefused notes that the peer does not take a slot. It returns false if it was not asked, or has
// taken it.
func (t *slotTable) noteRefused(s *slot) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !s.asked || s.accepted() {
		return false
	}
	s.asked, s.refused = false, true
	return true
}

// accepted reports whether the peer has begun the connection that the slot is at.
func (s *slot) accepted() bool { return s.peers.control.state.turn() == s.turn.Load() }

// giveBack gives back a slot that this end is done with. It is free when the peer is, too.
func (t *slotTable) giveBack(s *slot) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.leaving = append(t.leaving, s)
}

// reapLook is how many slots allocate looks at that connections have left. The last ones first:
// their memory is in the processor's caches.
const reapLook = 4

// reapLocked frees those of the last n slots left that the peer is done with, too. They are
// the first to be used again; the last, where the peer had no room for a connection on one: it
// may count those that were used as one's (link.mayPunch).
func (t *slotTable) reapLocked(n int) {
	for i := len(t.leaving) - 1; i >= max(0, len(t.leaving)-n); i-- {
		if s := t.leaving[i]; s.refused || s.peers.control.state.retired(s.turn.Load()) {
			t.leaving = slices.Delete(t.leaving, i, i+1)
			s.asked = false
			if s.refused {
				s.refused = false
				t.free = slices.Insert(t.free, 0, s)
			} else {
				t.free = append(t.free, s)
			}
		}
	}
}

// reclaim gives back the memory that connections left some time ago in the rings that this
// end writes. It reports whether it has to run again.
func (t *slotTable) reclaim(by peerEnd) (again bool) {
	for _, s := range t.list() {
		again = s.pages.reclaim(func(n uint64) bool { return !s.unread(by) && punchHole(s.own.ring, n, t.memory) }) || again
	}
	return again
}

// drained reports whether the peer needs nothing any more of what is in the ring: it may still be
// reading what the last connection has sent, or hold it. One that lies about its progress loses it,
// and so does one that takes a connection only after its end here: it had no part in it.
func (s *slot) drained() bool {
	return !s.accepted() || s.peers.control.state.retired(s.turn.Load()) || s.own.control.out.Backlog(&s.peers.control.in) == 0
}

// unread reports whether the peer may still read what is in the ring.
func (s *slot) unread(by peerEnd) bool {
	return !s.drained() && (by == peerThere || by == peerHungUp && s.peers.control.state.holds(s.turn.Load()))
}

// unread reports whether the peer may still read what an ended connection has left.
func (t *slotTable) unread(by peerEnd) bool {
	return slices.ContainsFunc(t.list(), func(s *slot) bool { return s.pages.any() && s.unread(by) })
}

// unmap unmaps all segments. Nobody here uses a slot any more. punch: it gives back what this end
// has written first, which the peer could keep with the segment's descriptor. One that has not
// ended the link may still have to read, and keeps the controls that tell it how much. Without punch,
// what is kept counts (unmapKept).
func (t *slotTable) unmap(punch bool, by peerEnd) {
	t.mu.Lock()
	segments := t.segments
	t.segments = nil
	t.mu.Unlock()
	list := t.list()
	for _, m := range segments {
		written, counted := uint64(0), int64(0)
		for _, s := range list[:m.own.slots] {
			n := s.pages.get()
			written += n
			if n == 0 || !punch || s.unread(by) || !punchHole(s.own.ring, n, t.memory) {
				counted += int64(max(n, ring.Start) - ring.Start)
			}
		}
		list = list[m.own.slots:]
		if punch && by != peerThere { // bell and controls, too
			punchHole(m.own.mem, 0, t.memory)
		}
		m.peers.unmap()
		m.own.unmapKept(t.memory, written)
		t.memory.Charge(-counted) // last: what is kept counts without a gap
	}
}
