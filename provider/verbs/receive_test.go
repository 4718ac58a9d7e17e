package verbs

import (
	"testing"

	"github.com/sanconn/san/session"
)

// Of messages that were found together the last one says that it is; and buffers are
// posted again as soon as a look finds nothing to do.
func TestLastOfWhatArrived(t *testing.T) {
	const count = repostBatch / 2
	a, b := pair(t, listen(t, Config{}), Config{})
	for n := range count {
		room := a.Reserve(64, 64, false)
		if room == nil {
			t.Fatalf("no room: %v", a.Err())
		}
		room[0] = byte(n)
		a.Commit(64)
	}
	if !until(b, func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.drain()
		return b.arrived.n == count
	}) {
		t.Fatalf("they do not arrive: %v", b.Err())
	}
	var ev session.Event
	for n := range count {
		if !b.Poll(&ev) || ev.Kind != session.Message || ev.Msg[0] != byte(n) {
			t.Fatalf("message %d: %+v, %v", n, ev, b.Err())
		}
		if want := n == count-1; ev.Last != want {
			t.Errorf("message %d of %d: Last is %v", n, count, ev.Last)
		}
		b.Drop()
	}
	if b.Poll(&ev) {
		t.Fatalf("an event that nobody caused: %+v", ev)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.taken != 0 {
		t.Errorf("%d buffers are not posted", b.taken)
	}
}
