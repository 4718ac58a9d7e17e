package sanconn

import (
	"errors"
	"syscall"
	"testing"
)

// inPhase returns a handover that has reached a phase.
func inPhase(p phase) handover {
	var h handover
	switch p {
	case proposed:
		h.commit(proposed)
	case onSAN, leaving, flushing:
		h.commit(onSAN)
	}
	if p == leaving || p == flushing {
		h.leave(false)
	}
	if p == flushing {
		h.left(0, true)
	}
	return h
}

// Each transition is possible from certain phases only. From any other it fails and changes nothing.
func TestTransitions(t *testing.T) {
	for name, tt := range map[string]struct {
		do   func(h *handover) error
		from map[phase]phase // the phases in which it is possible, and the next ones
	}{
		"proposal": {func(h *handover) error { return h.commit(proposed) }, map[phase]phase{onTCP: proposed}},
		"answer":   {func(h *handover) error { return h.commit(onSAN) }, map[phase]phase{onTCP: onSAN}},
		"agreed":   {func(h *handover) error { return h.answered(true) }, map[phase]phase{proposed: onSAN}},
		"refused":  {func(h *handover) error { return h.answered(false) }, map[phase]phase{proposed: onTCP}},
		"leave":    {func(h *handover) error { return h.leave(true) }, map[phase]phase{onSAN: leaving}},
		"begin":    {func(h *handover) error { return h.peerBegins(1, 0) }, map[phase]phase{onSAN: onSAN, leaving: leaving}},
		"leaves":   {func(h *handover) error { return h.peerLeaves(1) }, map[phase]phase{leaving: leaving}},
	} {
		for p := onTCP; p <= flushing; p++ {
			h := inPhase(p)
			before := h
			err := tt.do(&h)
			if to, ok := tt.from[p]; ok != (err == nil) || ok && h.phase != to || !ok && h != before {
				t.Errorf("%s on %v: %v, and then on %v", name, p, err, h.phase)
			}
		}
	}
}

// A connection that is half-closed, or whose descriptor is in use, does not move.
func TestNoCommit(t *testing.T) {
	for _, tt := range []struct {
		h    handover
		want error
	}{
		{handover{out: direction{shut: true}}, errHalfClosed},
		{handover{in: direction{shut: true}}, errHalfClosed},
		{handover{pinned: true}, errPinned},
	} {
		if err := tt.h.commit(proposed); !errors.Is(err, tt.want) {
			t.Errorf("%+v: %v", tt.h, err)
		}
	}
}

// A direction moves once, at a position that the reader has not passed.
func TestPositions(t *testing.T) {
	h := inPhase(onSAN)
	if h.begin(7); !h.out.begun || h.out.at != 7 {
		t.Errorf("begun: %+v", h.out)
	}
	for _, at := range []uint64{4, 1 << 63} {
		if err := h.peerBegins(at, 5); !errors.Is(err, errBegin) || h.in.begun {
			t.Errorf("at %d, behind what was read, or beyond all that can be: %v", at, err)
		}
	}
	if err := h.peerBegins(5, 5); err != nil || !h.turns(5) || h.turns(4) || h.beyond(5) || !h.beyond(6) {
		t.Errorf("%v, %+v", err, h.in)
	}
	if err := h.peerBegins(5, 5); !errors.Is(err, errBeginTwice) {
		t.Errorf("twice: %v", err)
	}
}

// The meaning of TCP's end, by phase and position.
func TestEndOfTCP(t *testing.T) {
	begun, ended, cut, back := inPhase(onSAN), inPhase(onSAN), inPhase(onSAN), inPhase(leaving)
	begun.peerBegins(3, 0)
	ended.sessionOver(true)
	cut.sessionOver(false)
	back.sessionOver(true)
	for _, tt := range []struct {
		name string
		h    handover
		read uint64
		want endOfTCP
	}{
		{"on TCP", inPhase(onTCP), 3, endIsEnd},
		{"proposed", inPhase(proposed), 3, endOpen},
		{"on the SAN", inPhase(onSAN), 3, endOpen},
		{"leaving", inPhase(leaving), 3, endOpen},
		{"flushing", inPhase(flushing), 3, endOpen}, // a reset that the flush has found is returned first
		{"at the position", begun, 3, endTurns},
		{"before the position", begun, 2, endIsCut},
		{"lost", handover{lost: true}, 3, endIsCut},
		{"the session has ended, and the peer had not moved", ended, 3, endIsEnd},
		{"the session was cut, and the peer may have moved", cut, 3, endIsCut},
		{"leaving, and the session has ended", back, 3, endOpen},
	} {
		if got := tt.h.endOf(tt.read); got != tt.want {
			t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
		}
	}
}

// The session's end may lose what the peer has sent by it, unless everything sent has come.
func TestTheSessionsEnd(t *testing.T) {
	begun := inPhase(onSAN)
	begun.peerBegins(3, 0)
	for _, tt := range []struct {
		name       string
		h          handover
		whole      bool
		over, lost bool
		phase      phase
	}{
		{"proposed", inPhase(proposed), false, false, true, onTCP},
		{"proposed, and nothing is on its way", inPhase(proposed), true, false, false, onTCP},
		{"on the SAN", inPhase(onSAN), false, true, true, onSAN},
		{"on the SAN, and nothing is on its way", inPhase(onSAN), true, true, false, onSAN},
		{"behind the peer's begin", begun, false, true, false, onSAN},
		{"leaving", inPhase(leaving), false, false, false, leaving},
	} {
		over := tt.h.sessionOver(tt.whole)
		if over != tt.over || tt.h.lost != tt.lost || tt.h.phase != tt.phase || tt.h.over != (tt.phase != onTCP) {
			t.Errorf("%s: over %v, %+v", tt.name, over, tt.h)
		}
	}
	back := inPhase(leaving)
	if back.leftInVain(); back.phase != onSAN || !back.lost || !back.over {
		t.Errorf("leaving in vain: %+v", back)
	}
	h := inPhase(proposed)
	h.sessionOver(false)
	if h.commit(proposed); h.answered(true) != nil || h.lost {
		t.Error("a peer that commits to another session has not committed to the one that was lost")
	}
	h.leave(true)
	if h.peerLeaves(9); !h.asked || h.mayLeave() || h.peerLeaves(9) == nil {
		t.Errorf("the peer's position on TCP is not known, and it leaves once: %+v", h)
	}
	if h.peerBegins(3, 3); !h.mayLeave() {
		t.Errorf("both positions are known: %+v", h)
	}
	h.sessionOver(true)
	if h.left(2, false); h.phase != onTCP || h.over || !h.hasLeft || h.in.begun || h.endOf(4) != endIsCut || h.endOf(5) != endIsEnd {
		t.Errorf("after all, with bytes that the peer has to send again: %+v", h)
	}
	if h.commit(proposed); h.hasLeft {
		t.Errorf("committed to the next session: %+v", h)
	}
	h = inPhase(leaving)
	h.tcpFailed(syscall.ECONNRESET)
	if h.left(0, true); h.endOf(0) != endOpen { // a reset that the flush finds is returned first
		t.Errorf("flushing: %+v", h)
	}
	if h.flushed(); h.phase != onTCP || h.endOf(0) != endIsCut {
		t.Errorf("flushed, and TCP was reset: %+v", h)
	}
}
