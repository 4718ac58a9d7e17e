package shm

import (
	"fmt"
	"math"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/provider/shm/internal/quota"
	"github.com/sanconn/san/session"
)

// table returns a slot table with one segment, as a dialing end has it.
func table(t *testing.T) *slotTable {
	t.Helper()
	var m segment
	for _, half := range []*mapping{&m.own, &m.peers} { // the test writes both
		var fd int
		var err error
		if *half, fd, err = newHalf(firstSlots, ownAccount(), false); err != nil {
			t.Fatal(err)
		}
		unix.Close(fd)
	}
	slots := new(slotTable)
	slots.init()
	slots.memory = budget().Of(quota.Own)
	slots.add(m, true)
	t.Cleanup(func() { slots.unmap(false, peerThere) })
	return slots
}

// connected allocates a slot, as for a connection that the peer has accepted.
func (t *slotTable) connected() *slot {
	s := t.allocate()
	s.begin(true)
	return s
}

// begin begins a connection on a slot as the dialing end does and, if taken, as the accepting end does.
func (s *slot) begin(taken bool) {
	s.turn.Store((s.turn.Load() + turnUnit) & turnMask)
	s.asked = true
	s.own.control.out.Reset()
	s.own.control.in.Reset()
	s.own.control.state.v.Store(s.turn.Load())
	if taken {
		s.peers.control.state.v.Store(s.turn.Load())
	}
}

// end returns a state of the connection that the slot now has.
func (s *slot) end(state uint32) uint32 { return s.turn.Load() | state }

// A slot is free again once both ends have retired from it, in either order, and not earlier.
func TestSlotIsFreeOnceBothSidesHaveRetired(t *testing.T) {
	for name, peerFirst := range map[string]bool{"the peer first": true, "the peer last": false} {
		t.Run(name, func(t *testing.T) {
			slots := table(t)
			s := slots.connected()
			peer := &s.peers.control.state.v
			isFree := func() bool { slots.reapLocked(1); return len(slots.free) == firstSlots }
			if peerFirst {
				peer.Store(s.end(stateClosed | stateHeld))
				slots.giveBack(s)
			} else {
				slots.giveBack(s)
				if isFree() {
					t.Error("free while the peer's end is open")
				}
				peer.Store(s.end(stateAborted | stateHeld))
			}
			if isFree() {
				t.Error("free while the peer holds it")
			}
			peer.Store(s.end(stateClosed))
			if !isFree() {
				t.Error("not free though both have retired")
			}
			slots.reapLocked(1)
			if len(slots.free) != firstSlots {
				t.Error("freed twice")
			}
			if slots.allocate() != s {
				t.Error("the slot that was used last is not the first to be used again")
			}
		})
	}
}

// A slot whose connect was abandoned is free when the peer has taken it and retired, or has refused it.
// What the peer has left there from the connection before does not count.
func TestSlotOfAnAbandonedConnect(t *testing.T) {
	for _, refused := range []bool{false, true} {
		for _, late := range []bool{false, true} {
			t.Run(fmt.Sprintf("refused=%v,late=%v", refused, late), func(t *testing.T) {
				slots := table(t)
				s := slots.connected()
				s.peers.control.state.v.Store(s.end(stateClosed))
				slots.giveBack(s)
				if slots.allocate() != s {
					t.Fatal("another slot")
				}
				s.begin(false)
				answer := func() {
					if !refused {
						s.peers.control.state.v.Store(s.turn.Load())
					} else if !slots.noteRefused(s) {
						t.Error("a refusal was not taken")
					}
				}
				if !late {
					answer()
				}
				s.own.control.state.v.Store(s.end(stateAborted))
				slots.giveBack(s)
				if late {
					slots.reapLocked(1)
					if len(slots.free) == firstSlots {
						t.Error("free though the peer may still take it")
					}
					answer()
				}
				if !refused {
					s.peers.control.state.v.Store(s.end(stateClosed))
				}
				slots.reapLocked(1)
				if n := len(slots.free); n != firstSlots {
					t.Errorf("%d of %d slots are free", n, firstSlots)
				}
				if len(slots.leaving) != 0 {
					t.Error("it will be freed again")
				}
				if slots.noteRefused(s) {
					t.Error("a refusal was taken of what had been taken, or refused")
				}
				if first := slots.allocate() == s; first == refused {
					t.Errorf("the first to be used again: %v", first)
				}
			})
		}
	}
}

// If no slot is free, allocate looks for slots from which the peer has retired in the meantime.
func TestTakeReapsWhatThePeerIsDoneWith(t *testing.T) {
	slots := table(t)
	var all []*slot
	for range firstSlots {
		all = append(all, slots.connected())
	}
	if slots.allocate() != nil {
		t.Fatal("a slot too many")
	}
	for i := range 2 * reapLook { // the last ones are looked at first
		slots.giveBack(all[5+i])
	}
	if slots.allocate() != nil {
		t.Fatal("a slot that the peer still uses")
	}
	all[5].peers.control.state.v.Store(all[5].end(stateClosed))
	if slots.allocate() != all[5] {
		t.Error("the slot that both are done with was not found")
	}
	for _, n := range []uint32{firstSlots, math.MaxUint32} {
		if slots.at(n) != nil {
			t.Errorf("there is a slot %d", n)
		}
	}
}

// A slot that the peer has refused once is like any other afterwards.
func TestSlotBehindARefusal(t *testing.T) {
	slots := table(t)
	s := slots.allocate()
	s.begin(false)
	if !slots.noteRefused(s) {
		t.Fatal("a refusal was not taken")
	}
	slots.giveBack(s)
	for next := slots.allocate(); next != s; next = slots.allocate() {
		if next == nil {
			t.Fatal("it is not free")
		}
	}
	s.begin(true)
	slots.giveBack(s)
	if slots.allocate() != nil {
		t.Error("free while the peer's end is open")
	}
}

// Connections still work when the count of a slot's turns wraps.
func TestTurnsWrap(t *testing.T) {
	l := listen(t, Config{})
	a, b := meet(t, l) // keep the link
	defer end(a)
	defer end(b)
	const before = 2 // connections of each slot before the count wraps
	for _, s := range a.(*endpoint).link.slots.list() {
		if s != a.(*endpoint).slot {
			s.turn.Store(turnMask - before*turnUnit)
		}
	}
	wrapped := 0
	for range (before + 3) * firstSlots {
		a, b := meet(t, l)
		if s := a.(*endpoint); s.turn == 0 {
			wrapped++
		}
		p, q := newPeer(a), newPeer(b)
		var ev session.Event
		if !p.send([]byte("to and")) || !q.poll(&ev) || string(ev.Msg) != "to and" {
			t.Fatalf("%q came at turn %d", ev.Msg, a.(*endpoint).turn/turnUnit)
		}
		q.Drop()
		end(b)
		if p.poll(&ev) || p.Err() == nil {
			t.Fatalf("the end does not come at turn %d", a.(*endpoint).turn/turnUnit)
		}
		end(a)
	}
	if wrapped == 0 {
		t.Error("no slot has come to the end of its turns")
	}
}
