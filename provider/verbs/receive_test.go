package verbs

import (
	"testing"

	"github.com/sanconn/san/session"
)

// Of messages that were found together the last one is marked; and buffers are
// posted again as soon as a look finds nothing to do.
func TestLastOfWhatArrived(t *testing.T) {
	const count = repostBatch / 2
	a, b := pair(t, listen(t, Config{}), Config{})
	deliver(t, a, b, count)
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
	b.q.mu.Lock()
	defer b.q.mu.Unlock()
	if b.recv.taken != 0 {
		t.Errorf("%d buffers are not posted", b.recv.taken)
	}
}

// Buffers that were dropped and are not posted yet are beside the window: a peer with
// credit for all of it finds a buffer for each message.
func TestWindowBesideWhatWasDropped(t *testing.T) {
	a, b := pair(t, listen(t, Config{}), Config{})
	var ev session.Event
	for waiting := 0; waiting < repostBatch-1; {
		deliver(t, a, b, 1)
		if !b.Poll(&ev) {
			t.Fatalf("nothing has come: %v", b.Err())
		}
		b.Drop()
		b.q.mu.Lock()
		waiting = len(b.recv.repost)
		b.q.mu.Unlock()
	}
	if window := b.Limits().Window; b.recv.taken != repostBatch {
		t.Fatalf("%d buffers are not posted, want all %d that are beside the window of %d", b.recv.taken, repostBatch, window)
	} else {
		deliver(t, a, b, window)
	}
	if a.Err() != nil || b.Err() != nil {
		t.Errorf("the connection has ended: %v, %v", a.Err(), b.Err())
	}
}

// deliver sends messages of 64 bytes, which begin with their numbers, and waits until
// the peer has found all.
func deliver(t *testing.T, from, to *Endpoint, count int) {
	t.Helper()
	for n := range count {
		var room []byte
		if !until(from, func() bool { room = from.Reserve(64, 64); return room != nil }) {
			t.Fatalf("no room: %v", from.Err())
		}
		room[0] = byte(n)
		from.Commit(64)
	}
	if !until(to, func() bool {
		to.q.mu.Lock()
		defer to.q.mu.Unlock()
		to.q.drainLocked()
		return to.recv.arrived.n == count
	}) {
		t.Fatalf("of %d messages %d arrive: %v", count, to.recv.arrived.n, to.Err())
	}
}
