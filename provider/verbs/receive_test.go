package verbs

import (
	"errors"
	"syscall"
	"testing"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/session"
)

// Of messages that one poll has found, the last one is marked. Buffers are posted again as soon as a
// poll finds nothing.
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
	if n := b.recv.unpostedLocked(); n != 0 {
		t.Errorf("%d buffers are not posted", n)
	}
}

// Buffers that were dropped, but are not posted again yet, are not part of the window: a peer that uses
// all of its credit finds a buffer for each message, and for the provider's own messages, too.
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
	window := b.Limits().Window
	if n := b.recv.unpostedLocked(); n != repostBatch {
		t.Fatalf("%d buffers are not posted, want all %d that are beside the window of %d", n, repostBatch, window)
	}
	deliver(t, a, b, window)
	a.send.postEmpty() // the disconnect message, for which there must be a buffer although b takes nothing
	if err := a.q.await(patient(t), func() bool { return a.send.underwayLocked() == 0 }); err != nil {
		t.Errorf("the provider's own message: %v", err)
	}
	if a.Err() != nil || b.Err() != nil {
		t.Errorf("the connection has ended: %v, %v", a.Err(), b.Err())
	}
}

// All credit of several connections is used at the same time, in both directions, before anybody reads.
func TestWindowsInFullUse(t *testing.T) {
	nothingLeft(t)
	all := crowd(t, listen(t, Config{}), 4)
	for i, e := range all {
		deliver(t, e, all[i^1], all[i^1].Limits().Window)
	}
	for _, e := range all {
		for range e.Limits().Window {
			event(t, e)
			e.Drop()
		}
	}
	chat(t, all, 20)
}

// A peer that sends more messages than there are buffers loses its connection. No other connection is
// affected.
func TestPeerOverspends(t *testing.T) {
	nothingLeft(t)
	all := crowd(t, listen(t, Config{}), 2)
	chat(t, all, 10)
	hostile, victim := all[0], all[1]
	for range 2 * victim.cfg.buffers {
		if !until(hostile, func() bool { return hostile.Reserve(16, 16) != nil }) {
			break
		}
		hostile.Commit(16)
	}
	if err := endOf(t, hostile); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("its end: %v, want ECONNRESET", err)
	}
	hostile.discard()
	endOf(t, victim)
	victim.discard()
	chat(t, all[2:], 50)
}

// A message that is longer than its buffer ends only its own connection.
func TestMessageTooLong(t *testing.T) {
	nothingLeft(t)
	all := crowd(t, listen(t, Config{bufferSize: 512}), 3)
	e := all[0]
	e.q.mu.Lock()
	e.send.wr[0] = ibv.SendWR{Opcode: ibv.OpSend}
	e.send.wr[0].SGE = ibv.SGE{Addr: uint64(addressOf(e.send.mem)), Length: 1024, LKey: e.send.mr.LKey}
	e.send.postLocked(true)
	e.q.mu.Unlock()
	if err := endOf(t, all[1]); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("%v, want ECONNRESET", err)
	}
	e.discard()
	all[1].discard()
	chat(t, all[2:], 50)
}

// unpostedLocked returns how many buffers wait to be posted again, or are with the session.
func (r *receiveQueue) unpostedLocked() int {
	n := len(r.repost) + r.arrived.n + r.kept.n
	if r.last.n > 0 {
		n++
	}
	return n
}

// deliver sends messages of 64 bytes, which begin with their numbers, and waits until the peer has got
// all.
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
