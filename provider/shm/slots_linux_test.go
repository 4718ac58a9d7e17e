package shm

import (
	"math"
	"testing"

	"golang.org/x/sys/unix"
)

// table returns a slot table with one segment, as the dialing end has it.
func table(t *testing.T) *slotTable {
	t.Helper()
	var m segment
	for _, half := range []*mapping{&m.own, &m.peers} { // both written by the test
		var fd int
		var err error
		if *half, fd, err = newHalf(firstSlots, ownAccount(), false); err != nil {
			t.Fatal(err)
		}
		unix.Close(fd)
	}
	slots := new(slotTable)
	slots.init()
	slots.add(m, true)
	t.Cleanup(func() { slots.unmap(false, false) })
	return slots
}

// connected takes a slot as for a connection that the peer has accepted.
func (t *slotTable) connected() *slot {
	s := t.take()
	for _, end := range []part{s.own, s.peers} {
		end.control.reset()
	}
	reply := t.connect(s)
	t.replied(uint32(s.number), codeOK)
	<-reply
	return s
}

// A slot is free again once both sides have retired from it, in whichever order, and no
// earlier.
func TestSlotIsFreeOnceBothSidesHaveRetired(t *testing.T) {
	for name, peerFirst := range map[string]bool{"the peer first": true, "the peer last": false} {
		t.Run(name, func(t *testing.T) {
			slots := table(t)
			s := slots.connected()
			peer := &s.peers.control.state.v
			isFree := func() bool { slots.reapLocked(1); return len(slots.free) == firstSlots }
			if peerFirst {
				peer.Store(stateClosed | stateHeld)
				slots.retire(s)
			} else {
				slots.retire(s)
				if isFree() {
					t.Error("free while the peer's end is open")
				}
				peer.Store(stateAborted | stateHeld)
			}
			if isFree() {
				t.Error("free while the peer holds it")
			}
			peer.Store(stateClosed)
			if !isFree() {
				t.Error("not free though both have retired")
			}
			slots.reapLocked(1)
			if len(slots.free) != firstSlots {
				t.Error("freed twice")
			}
			if slots.take() != s {
				t.Error("the slot that was used last is not the first to be used again")
			}
		})
	}
}

// A slot whose connect was abandoned is free when the peer has replied and retired.
func TestSlotOfAnAbandonedConnect(t *testing.T) {
	for name, code := range map[string]uint8{"accepted": codeOK, "refused": codeResources} {
		for when, late := range map[string]bool{"late": true, "in time": false} {
			t.Run(name+" "+when, func(t *testing.T) {
				slots := table(t)
				s := slots.take()
				slots.connect(s)
				if !late {
					slots.replied(uint32(s.number), code)
				}
				s.own.control.state.v.Store(stateAborted)
				slots.retire(s)
				if late {
					slots.reapLocked(1)
					if len(slots.free) == firstSlots {
						t.Error("free though the peer may still accept")
					}
					slots.replied(uint32(s.number), code)
				}
				if code == codeOK {
					s.peers.control.state.v.Store(stateClosed)
				}
				slots.reapLocked(1)
				if n := len(slots.free); n != firstSlots {
					t.Errorf("%d of %d slots are free", n, firstSlots)
				}
				if len(slots.leaving) != 0 {
					t.Error("it will be freed again")
				}
				if slots.replied(uint32(s.number), code) {
					t.Error("a second reply was taken")
				}
				if first := slots.take() == s; first != (code == codeOK) {
					t.Errorf("the first to be used again: %v", first)
				}
			})
		}
	}
}

// When none is free, take looks for slots that the peer has retired from meanwhile.
func TestTakeReapsWhatThePeerIsDoneWith(t *testing.T) {
	slots := table(t)
	var all []*slot
	for range firstSlots {
		all = append(all, slots.connected())
	}
	if slots.take() != nil {
		t.Fatal("a slot too many")
	}
	slots.retire(all[5])
	if slots.take() != nil {
		t.Fatal("a slot that the peer still uses")
	}
	all[5].peers.control.state.v.Store(stateClosed)
	if slots.take() != all[5] {
		t.Error("the slot that both are done with was not found")
	}
	for _, n := range []uint32{firstSlots, math.MaxUint32} {
		if slots.at(n) != nil {
			t.Errorf("there is a slot %d", n)
		}
	}
}
