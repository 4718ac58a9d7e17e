package endpointtest

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"runtime"
	"testing"

	"github.com/sanconn/san/session"
)

func testLimits(t *testing.T, mk Maker) {
	a, b := pair(t, mk)
	for _, e := range []*end{a, b} {
		l := e.lim
		if l.Provider == "" {
			t.Error("no name")
		}
		if l.MaxMessage < session.MaxControl {
			t.Errorf("MaxMessage %d is less than MaxControl %d", l.MaxMessage, session.MaxControl)
		}
		if l.Window != 0 && l.Window < session.MinWindow {
			t.Errorf("Window %d is less than MinWindow %d", l.Window, session.MinWindow)
		}
		if (l.CanRead || l.CanWrite) && l.MaxRDMA <= 0 {
			t.Errorf("remote access with MaxRDMA %d", l.MaxRDMA)
		}
		if e.mem == nil {
			if own := (session.Limits{Provider: l.Provider, MaxMessage: l.MaxMessage, Window: l.Window, Spin: l.Spin}); l != own {
				t.Errorf("limits of memory where there is none: %+v", l)
			}
		}
		if e.Memory() != e.mem {
			t.Error("another Memory the second time")
		}
		if l.Threshold > 0 && !l.CanRead && !l.CanWrite && !e.peer.lim.CanRead && !e.peer.lim.CanWrite {
			t.Errorf("Threshold %d though nobody can read or write", l.Threshold)
		}
		if again := e.Limits(); again != l {
			t.Errorf("limits changed from %+v to %+v", l, again)
		}
		if err := e.Err(); err != nil {
			t.Errorf("a new connection has ended: %v", err)
		}
	}
}

// Messages arrive whole, once and in order, of every size, in both directions at the same time.
func testMessages(t *testing.T, mk Maker) {
	const count = 2000
	a, b := pair(t, mk)
	sender := func(e *end, seed uint64) func() error {
		return func() error {
			r := rand.New(rand.NewPCG(seed, 1))
			for seq := range uint64(count) {
				size := minMessage + r.IntN(100)
				post := e.post
				switch {
				case r.IntN(8) == 0:
					post, size = e.postControl, minMessage+r.IntN(session.MaxControl-minMessage+1)
				case r.IntN(4) == 0:
					size = minMessage + r.IntN(e.maxMessage()-minMessage+1)
				case r.IntN(16) == 0:
					size = e.maxMessage()
				}
				if err := post(seq, size); err != nil {
					return fmt.Errorf("sending %d: %w", seq, err)
				}
			}
			return nil
		}
	}
	receiver := func(e *end) func() error { return func() error { return e.expectAll(count) } }
	together(t, sender(a, 1), sender(b, 2), receiver(a), receiver(b))
	for _, e := range []*end{a, b} {
		var ev session.Event
		if e.Poll(&ev) {
			t.Errorf("an event too many: %+v", ev)
		}
	}
}

// Reserve gives room between its bounds; Commit sends the given number of its bytes.
func testReserve(t *testing.T, mk Maker) {
	a, b := pair(t, mk)
	largest := a.maxMessage()
	for seq, tt := range []struct{ lo, hi int }{
		{minMessage, minMessage},
		{minMessage, largest},
		{largest, largest},
		{max(minMessage, 1000%largest), largest},
	} {
		must(t, a.credit(false))
		room, err := a.reserve(tt.lo, tt.hi)
		must(t, err)
		n := max(minMessage, len(room)-seq)
		a.Commit(compose(room[:n], uint64(seq)))
		must(t, b.expectOf(uint64(seq), n))
	}
	// The smallest possible message.
	must(t, a.credit(false))
	room, err := a.reserve(1, 1)
	must(t, err)
	room[0] = 42
	a.Commit(1)
	m, err := b.message()
	must(t, err)
	if !bytes.Equal(m, []byte{42}) {
		t.Errorf("one byte arrived as %v", m)
	}
	b.drop()
}

// Room that is committed with no byte is free again, and nothing arrives.
func testCommitNothing(t *testing.T, mk Maker) {
	const rounds = 1000 // more than any queue has room for
	a, b := pair(t, mk)
	for range rounds {
		room, err := a.reserve(minMessage, a.maxMessage())
		must(t, err)
		fill(room, 0xEE)
		a.Commit(0)
	}
	must(t, a.post(1, 100))
	must(t, b.expect(1))
}

// Reserved room for control that is abandoned is free again, and nothing arrives.
func testReserveControl(t *testing.T, mk Maker) {
	const rounds = 1000
	a, b := pair(t, mk)
	for range rounds {
		room, err := a.reserveControl(session.MaxControl)
		must(t, err)
		fill(room, 0xEE)
	}
	for seq, size := range []int{minMessage, minMessage + 1, session.MaxControl} {
		must(t, a.credit(true))
		room, err := a.reserveControl(size)
		must(t, err)
		a.CommitControl(compose(room[:size], uint64(seq)))
		must(t, b.expectOf(uint64(seq), size))
	}
}

// Control that is committed between a Reserve and its Commit is sent at once, before the data, and does
// not touch the room that is being filled.
func testControlBetween(t *testing.T, mk Maker) {
	const rounds = 500
	a, b := pair(t, mk)
	r := rand.New(rand.NewPCG(6, 6))
	for range rounds {
		must(t, a.credit(false))
		room, err := a.reserve(minMessage, minMessage+r.IntN(a.maxMessage()-minMessage+1))
		must(t, err)
		fill(room, 0xEE)
		controls := uint64(r.IntN(session.ControlReserve + 1))
		for seq := range controls {
			must(t, a.postControl(seq, minMessage+r.IntN(session.MaxControl-minMessage+1)))
		}
		early := r.IntN(2) == 0 // the peer gets it before the Commit
		if early {
			must(t, b.expectFrom(0, controls))
		}
		if bytes.Count(room, []byte{0xEE}) != len(room) {
			t.Fatalf("%d control messages have changed the room for data", controls)
		}
		size := len(room)
		if nothing := r.IntN(4) == 0; nothing {
			size = 0
			a.Commit(0)
			a.keepCredit()
		} else {
			a.Commit(compose(room, controls))
		}
		if !early {
			must(t, b.expectFrom(0, controls))
		}
		if size > 0 {
			must(t, b.expectOf(controls, size))
		}
	}
}

func fill(b []byte, v byte) {
	for i := range b {
		b[i] = v
	}
}

// If the peer does not poll, data stops but control does not, even while room for data is reserved. Once
// the peer polls, an end armed for SendReady is woken, and nothing is lost.
func testBackPressure(t *testing.T, mk Maker) {
	a, b := pair(t, mk)
	size := min(a.maxMessage(), 4096)
	count := a.fillUp(t, size, 1<<30)
	a.postReserve(t, count)
	sent := count + session.ControlReserve
	together(t,
		func() error { return a.post(sent, size) },
		func() error { return b.expectFrom(0, sent+1) })

	a, b = pair(t, mk)
	count = a.fillUp(t, size, count-1)
	must(t, a.credit(false))
	room, read := a.Reserve(size, size), uint64(0)
	for ; room == nil && read < count; read++ { // fewer than before: that depends on what has been acknowledged
		must(t, b.expect(read))
		room = a.Reserve(size, size)
	}
	if room == nil { // what the peer has read may be acknowledged a little later
		var err error
		room, err = a.reserve(size, size)
		must(t, err)
	}
	a.postReserve(t, count)
	sent = count + session.ControlReserve
	a.Commit(compose(room, sent))
	must(t, b.expectFrom(read, sent+1))
}

// fillUp sends data messages from number 0 on, at most most, until there is no room or credit. It
// returns how many it has sent.
func (e *end) fillUp(t *testing.T, size int, most uint64) (count uint64) {
	t.Helper()
	const tooMuch = 1 << 30 // bytes; a queue that takes more has no bound
	for count < most && (e.peer.lim.Ring() || e.credits.Load() > session.ControlReserve) {
		room := e.Reserve(size, size)
		if room == nil {
			break
		}
		e.credits.Add(-1)
		e.Commit(compose(room, count))
		if count++; count*uint64(size) > tooMuch {
			t.Fatalf("%d bytes were taken though nobody polls", tooMuch)
		}
	}
	return count
}

// postReserve sends as many control messages as there always is room for.
func (e *end) postReserve(t *testing.T, seq uint64) {
	t.Helper()
	for i := range session.ControlReserve {
		room := e.ReserveControl(session.MaxControl)
		if room == nil {
			t.Fatalf("control message %d of %d found no room behind blocked data", i+1, session.ControlReserve)
		}
		e.credits.Add(-1)
		e.CommitControl(compose(room[:session.MaxControl], seq+uint64(i)))
	}
}

// Kept messages stay as they are, oldest first, however many later messages are dropped.
func testKeepAndDrop(t *testing.T, mk Maker) {
	const count = 3000
	a, b := pair(t, mk)
	largest := min(a.maxMessage(), 2048)
	together(t,
		func() error {
			r := rand.New(rand.NewPCG(3, 3))
			for seq := range uint64(count) {
				if err := a.post(seq, minMessage+r.IntN(largest-minMessage+1)); err != nil {
					return err
				}
			}
			return nil
		},
		func() error {
			k := keeper{end: b, r: rand.New(rand.NewPCG(4, 4)), most: 40}
			if !b.lim.Ring() {
				k.most = b.lim.Window - session.ControlReserve - 1
			}
			for seq := range uint64(count) {
				if err := k.take(seq); err != nil {
					return err
				}
			}
			return k.releaseAll()
		})
}

// keeper receives messages, and keeps some of them for some time.
type keeper struct {
	*end
	r    *rand.Rand
	most int // how many it keeps: many, but not so many that no message can flow
	kept []uint64
}

// take releases some of the kept messages, and takes the next message.
func (k *keeper) take(seq uint64) error {
	for len(k.kept) > 0 && (len(k.kept) > k.most || k.r.IntN(3) == 0) {
		if err := k.releaseOne(); err != nil {
			return err
		}
	}
	var ev session.Event
	if err := k.await(&ev); err != nil {
		return err
	}
	if err := verify(ev.Msg, seq); err != nil {
		return err
	}
	if k.r.IntN(2) == 0 {
		k.Keep()
		k.kept = append(k.kept, seq)
	} else {
		k.drop()
	}
	return k.checkFront()
}

// await waits for an event, and releases more meanwhile: a ring may be full of kept messages, or of
// messages that were dropped behind these.
func (k *keeper) await(ev *session.Event) error {
	for !k.Poll(ev) {
		if len(k.kept) > 0 {
			if k.r.IntN(2) == 0 {
				if err := k.releaseOne(); err != nil {
					return err
				}
			}
			continue
		}
		k.Arm(session.RecvReady)
		if k.Poll(ev) {
			break
		}
		if err := k.sleep(k.recv, "message"); err != nil {
			return err
		}
	}
	return nil
}

func (k *keeper) releaseOne() error {
	if err := verify(k.Front(), k.kept[0]); err != nil {
		return fmt.Errorf("kept: %w", err)
	}
	k.release()
	k.kept = k.kept[1:]
	return nil
}

func (k *keeper) releaseAll() error {
	for len(k.kept) > 0 {
		if err := k.releaseOne(); err != nil {
			return err
		}
	}
	return nil
}

func (k *keeper) checkFront() error {
	front := k.Front()
	if len(k.kept) == 0 {
		if front != nil {
			return fmt.Errorf("front of %d bytes though nothing is kept", len(front))
		}
		return nil
	}
	if err := verify(front, k.kept[0]); err != nil {
		return fmt.Errorf("front: %w", err)
	}
	return nil
}

func testNoAllocation(t *testing.T, mk Maker) {
	a, b := pair(t, mk)
	turn := func() {
		if a.post(0, 256) != nil || b.spinExpect(0) != nil ||
			b.post(0, 256) != nil || a.spinExpect(0) != nil {
			t.Error("lost")
		}
	}
	for range 100 { // so that pools fill
		turn()
	}
	if n := testing.AllocsPerRun(1000, turn); n > 0 {
		t.Errorf("%v allocations per round trip of messages", n)
	}
}

// spinExpect polls until message seq comes, and drops it. Only the test binary's timeout bounds it: a
// timer would allocate.
func (e *end) spinExpect(seq uint64) error {
	for !e.Poll(&e.event) {
		if err := e.Err(); err != nil {
			return err
		}
		runtime.Gosched() // AllocsPerRun leaves one P
	}
	err := verify(e.event.Msg, seq)
	e.drop()
	return err
}
