package shm

import (
	"testing"

	"github.com/sanconn/san/session"
)

// News are heard once, with their kind, whatever the slot; and those of slots that are not there
// when they are.
func TestNewsAreHeardOnce(t *testing.T) {
	b := new(bell)
	var h heard
	got := map[int]session.Events{}
	take := func() map[int]session.Events {
		clear(got)
		if h.pending(b) {
			h.take(b, func(slot int, ev session.Events) { got[slot] |= ev })
		}
		return got
	}
	h.most.Store(firstSlots)
	for i := range 3 {
		b.tell(3, session.RecvReady)
		b.tell(3, session.RecvReady)
		b.tell(5, session.SendReady)
		b.tell(7, session.SendReady|session.RecvReady)
		if got := take(); len(got) != 3 || got[3] != session.RecvReady || got[5] != session.SendReady || got[7] != 3 {
			t.Errorf("round %d: %v", i, got)
		}
		if got := take(); len(got) != 0 {
			t.Errorf("again: %v", got)
		}
	}
	b.tell(linkSlots-1, session.RecvReady)
	if got := take(); len(got) != 0 {
		t.Errorf("of a slot that is not there: %v", got)
	}
	h.most.Store(linkSlots)
	if got := take(); len(got) != 1 || got[linkSlots-1] != session.RecvReady {
		t.Errorf("now that it is there: %v", got)
	}
	b.slots[0].Store(1<<32 - 1) // a count that wraps tells too much
	b.groups[0].Add(1)
	take()
	b.tell(0, session.RecvReady)
	if got := take(); got[0]&session.RecvReady == 0 {
		t.Errorf("behind the last number: %v", got)
	}
}
