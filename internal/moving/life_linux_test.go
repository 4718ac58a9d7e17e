package moving

import (
	"runtime"
	"testing"
)

// A connection that was given up takes no proposal. One that has a proposal is not given up until that
// was refused.
func TestGivenUp(t *testing.T) {
	var given, refused Life
	if !given.GiveUp() || given.propose(true) || !given.GiveUp() {
		t.Error("it takes a proposal")
	}
	if !refused.propose(true) || refused.GiveUp() || refused.propose(false) || !refused.GiveUp() {
		t.Error("it is not given up when it should be")
	}
}

// A connection that is closed while it moves does not count as open for ever.
func TestStatsOfAMoveThatCloseHasOvertaken(t *testing.T) {
	before := Counted().Open["fake"]
	l := Life{dialed: true}
	l.Closed()
	l.Moved("fake")
	l.Left(nil) // as for a connection that was closed on its way back
	if n := Counted().Open["fake"] - before; n != 0 {
		t.Errorf("%d are open", n)
	}
	back := Life{dialed: true}
	back.Moved("fake")
	back.Left(nil)
	back.Closed()
	if n := Counted().Open["fake"] - before; n != 0 {
		t.Errorf("%d are open that have gone back", n)
	}
}

// A closed connection is not found any more.
func TestClosedConnectionIsNotFound(t *testing.T) {
	_, _, h, l := stampedPair(t)
	held := new(closing)
	l.Held = held
	if accepted.at(l.ends) == nil {
		t.Error("it is not found before")
	}
	l.Closed()
	if accepted.at(l.ends) != nil || !held.closed {
		t.Error("it is")
	}
	runtime.KeepAlive(h)
}

type closing struct{ closed bool }

func (c *closing) Close() error { c.closed = true; return nil }
