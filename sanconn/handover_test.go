package sanconn

import (
	"errors"
	"testing"
)

// inPhase is a handover that has come to a phase.
func inPhase(p phase) handover {
	var h handover
	switch p {
	case proposed:
		h.commit(proposed)
	case onSAN, leaving:
		h.commit(onSAN)
	}
	if p == leaving {
		h.leave()
	}
	return h
}

// Each transition goes from one phase alone, and leaves a refused one where it was.
func TestTransitions(t *testing.T) {
	for name, tt := range map[string]struct {
		do   func(h *handover) error
		from map[phase]phase // the phases in which it may be, and which follow
	}{
		"proposal": {func(h *handover) error { return h.commit(proposed) }, map[phase]phase{onTCP: proposed}},
		"answer":   {func(h *handover) error { return h.commit(onSAN) }, map[phase]phase{onTCP: onSAN}},
		"agreed":   {func(h *handover) error { return h.answered(true) }, map[phase]phase{proposed: onSAN}},
		"refused":  {func(h *handover) error { return h.answered(false) }, map[phase]phase{proposed: onTCP}},
		"leave":    {func(h *handover) error { return h.leave() }, map[phase]phase{onSAN: leaving}},
	} {
		for p := onTCP; p <= leaving; p++ {
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
		{handover{out: direction{ended: true}}, errHalfClosed},
		{handover{in: direction{ended: true}}, errHalfClosed},
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
	if err := h.peerBegins(4, 5); !errors.Is(err, errBegin) || h.in.begun {
		t.Errorf("behind what was read: %v", err)
	}
	if err := h.peerBegins(5, 5); err != nil || !h.turns(5) || h.turns(4) || h.beyond(5) || !h.beyond(6) {
		t.Errorf("%v, %+v", err, h.in)
	}
	if err := h.peerBegins(5, 5); !errors.Is(err, errBeginTwice) {
		t.Errorf("twice: %v", err)
	}
}

// What the end of TCP means.
func TestEndOfTCP(t *testing.T) {
	begun := inPhase(onSAN)
	begun.peerBegins(3, 0)
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
		{"at the position", begun, 3, endTurns},
		{"before the position", begun, 2, endIsCut},
		{"lost", handover{lost: true}, 3, endIsCut},
	} {
		if got := tt.h.endOf(tt.read); got != tt.want {
			t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
		}
	}
}

// The session's end loses what the peer may have sent by it, unless all of that has come.
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
		{"on the SAN", inPhase(onSAN), true, true, true, onSAN},
		{"behind the peer's begin", begun, false, true, false, onSAN},
		{"leaving", inPhase(leaving), false, false, false, leaving},
	} {
		if over := tt.h.sessionEnded(tt.whole); over != tt.over || tt.h.lost != tt.lost || tt.h.phase != tt.phase {
			t.Errorf("%s: over %v, %+v", tt.name, over, tt.h)
		}
	}
	back := inPhase(leaving)
	if back.stays(); back.phase != onSAN || !back.lost {
		t.Errorf("leaving in vain: %+v", back)
	}
	h := inPhase(proposed)
	h.sessionEnded(false)
	if h.commit(proposed); h.answered(true) != nil || h.lost {
		t.Error("a peer that commits to another session has not committed to the one that was lost")
	}
	h.leave()
	h.peerBegins(3, 3)
	if h.left(2); h.phase != onTCP || h.in.begun || h.endOf(4) != endIsCut || h.endOf(5) != endIsEnd {
		t.Errorf("after all, with bytes that the peer has to send again: %+v", h)
	}
}
