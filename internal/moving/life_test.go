package moving

import "testing"

// A connection that is closed while it moves is not counted as open for ever.
func TestStatsOfAMoveThatCloseHasOvertaken(t *testing.T) {
	before := Counted().Open["fake"]
	l := Life{dialed: true}
	l.Closed()
	l.Moved("fake")
	if n := Counted().Open["fake"] - before; n != 0 {
		t.Errorf("%d are open", n)
	}
}
