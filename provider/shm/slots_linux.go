package shm

import (
	"slices"
	"sync"
	"sync/atomic"

	"github.com/sanconn/san/provider/shm/internal/ring"
)

// slot is the place of one connection in both halves of a segment. The dialing end allocates slots, and
// reuses a slot only when both sides have retired from it.
type slot struct {
	number int
	own    part
	peers  part
	turn   atomic.Uint32            // the number of its connection, as in sideState
	ep     atomic.Pointer[endpoint] // until the endpoint retires
	pages  cachedPages              // of the ring that this end writes

	asked   bool // a connect was sent, which the peer may refuse; dialing end only, guarded by the table's mu, like
	refused bool // … the peer has refused it, so it never had the slot
	charged bool // counted in the peer's user's connections until the link's end; accepting end only, guarded by the link's mu
}

// slotTable holds the slots of a link, and at the dialing end which of them are free.
type slotTable struct {
	all    atomic.Pointer[[]*slot] // replaced as a whole when it grows
	memory ring.Share              // for the rings that this end writes

	mu       sync.Mutex // guards the fields below
	segments []segment
	free     []*slot
	leaving  []*slot // this end has retired from them, the peer perhaps not
}

func (t *slotTable) init() { t.all.Store(new([]*slot)) }

func (t *slotTable) list() []*slot { return *t.all.Load() }

// at returns the slot with a number, or nil.
func (t *slotTable) at(number uint32) *slot {
	if list := t.list(); int64(number) < int64(len(list)) {
		return list[number]
	}
	return nil
}

// add adds a segment's slots; at the dialing end they are free. One goroutine at a time adds.
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
		for i := len(list) - 1; i >= len(old); i-- { // so that the first slot is taken first
			t.free = append(t.free, list[i])
		}
	}
}

// allocate returns a slot that neither side uses, or nil.
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

// noteRefused notes that the peer has refused the slot's connect. It returns false if there was none,
// or if the peer has taken the connection.
func (t *slotTable) noteRefused(s *slot) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !s.asked || s.accepted() {
		return false
	}
	s.asked, s.refused = false, true
	return true
}

// accepted reports whether the peer has begun the slot's present connection.
func (s *slot) accepted() bool { return s.peers.control.state.turn() == s.turn.Load() }

// giveBack returns a slot from which this end has retired. It is free when the peer has retired, too.
func (t *slotTable) giveBack(s *slot) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.leaving = append(t.leaving, s)
}

// reapLook is how many of the slots in leaving allocate examines. It takes the newest, whose memory is
// in the processor's caches.
const reapLook = 4

// reapLocked frees those of the newest n slots in leaving from which the peer has retired, too. They
// are the first to be used again. A slot whose connect the peer has refused is the last: the peer may
// have room only for slots that it has counted before (link.mayPunch).
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

// reclaim gives back the memory that connections have left some time ago in the rings that this end
// writes. It reports whether it has to be called again.
func (t *slotTable) reclaim(by peerEnd) (again bool) {
	for _, s := range t.list() {
		again = s.pages.reclaim(func(n uint64) bool { return !s.unread(by) && punchHole(s.own.ring, n, t.memory) }) || again
	}
	return again
}

// drained reports whether the peer needs nothing more from the ring. It may still be reading what the last
// connection has sent, or keep it. A peer that publishes false progress loses bytes. So does one that takes
// a connection only after it has ended here: that peer had no part in it.
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

// unmap unmaps all segments. No slot is in use at this end. With punch it first gives back the memory
// that this end has written, which the peer could keep by the segment's descriptor. Bytes that the peer
// may still read stay. So do, for a peer that has not hung up, the controls that tell it how many they
// are. Without punch, memory that the peer keeps counts as its user's (unmapKept).
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
		if punch && by != peerThere { // bell and controls as well
			punchHole(m.own.mem, 0, t.memory)
		}
		m.peers.unmap()
		m.own.unmapKept(t.memory, written)
		t.memory.Charge(-counted) // last, so that what the peer keeps is counted throughout
	}
}
