package endpointtest

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"syscall"
	"testing"
	"time"

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

// Messages arrive whole, once, in order, of every size, in both directions at
// the same time.
func testMessages(t *testing.T, mk Maker) {
	const count = 2000
	a, b := pair(t, mk)
	sender := func(e *end, seed uint64) func() error {
		return func() error {
			r := rand.New(rand.NewPCG(seed, 1))
			for seq := range uint64(count) {
				size := minMessage + r.IntN(100)
				control := r.IntN(8) == 0
				switch {
				case control:
					size = minMessage + r.IntN(session.MaxControl-minMessage+1)
				case r.IntN(4) == 0:
					size = minMessage + r.IntN(e.maxMessage()-minMessage+1)
				case r.IntN(16) == 0:
					size = e.maxMessage()
				}
				if err := e.post(seq, size, control); err != nil {
					return fmt.Errorf("sending %d: %w", seq, err)
				}
			}
			return nil
		}
	}
	receiver := func(e *end) func() error {
		return func() error {
			for seq := range uint64(count) {
				if err := e.expect(seq); err != nil {
					return err
				}
			}
			return nil
		}
	}
	together(t, sender(a, 1), sender(b, 2), receiver(a), receiver(b))
	for _, e := range []*end{a, b} {
		var ev session.Event
		if e.Poll(&ev) {
			t.Errorf("an event too many: %+v", ev)
		}
	}
}

func testReserve(t *testing.T, mk Maker) {
	a, b := pair(t, mk)
	largest := a.maxMessage()
	seq := uint64(0)
	for _, tt := range []struct {
		lo, hi  int
		control bool
	}{
		{minMessage, minMessage, false},
		{minMessage, largest, false},
		{largest, largest, false},
		{1000 % largest, largest, false},
		{minMessage, session.MaxControl, true},
		{session.MaxControl, session.MaxControl, true},
		{minMessage, minMessage, true},
	} {
		lo := max(tt.lo, minMessage)
		must(t, a.credit(tt.control))
		room, err := a.reserve(lo, tt.hi, tt.control)
		must(t, err)
		// Abandoned by the next Reserve, whatever was written into it.
		fill(room, 0xEE)
		room, err = a.reserve(lo, tt.hi, tt.control)
		must(t, err)
		// Less than what was given, and not less than a message.
		n := max(minMessage, len(room)-int(seq))
		a.Commit(compose(room[:n], seq))
		m, err := b.message()
		must(t, err)
		if len(m) != n {
			t.Errorf("Reserve(%d, %d, %v), Commit(%d): %d bytes arrived", lo, tt.hi, tt.control, n, len(m))
		}
		must(t, verify(m, seq))
		b.drop()
		seq++
	}
	// The smallest message that there is.
	must(t, a.credit(false))
	room, err := a.reserve(1, 1, false)
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

func fill(b []byte, v byte) {
	for i := range b {
		b[i] = v
	}
}

// A peer that does not poll stops data, not control; once it polls, whoever
// armed for SendReady is woken, and nothing is lost.
func testBackPressure(t *testing.T, mk Maker) {
	a, b := pair(t, mk)
	size := min(a.maxMessage(), 4096)
	seq := uint64(0)
	try := func(size int, control bool) bool {
		reserve := int64(session.ControlReserve)
		if control {
			reserve = 0
		}
		if b.lim.Window > 0 && a.credits.Load() <= reserve {
			return false
		}
		room := a.Reserve(size, size, control)
		if room == nil {
			return false
		}
		a.credits.Add(-1)
		a.Commit(compose(room, seq))
		seq++
		return true
	}
	const tooMuch = 1 << 30 // a queue that takes more has no bound
	for bytes := 0; try(size, false); bytes += size {
		if bytes > tooMuch {
			t.Fatalf("%d bytes were taken though nobody polls", bytes)
		}
	}
	for i := range session.ControlReserve {
		if !try(session.MaxControl, true) {
			t.Fatalf("control message %d of %d found no room behind blocked data", i+1, session.ControlReserve)
		}
	}
	sent := seq
	together(t,
		func() error { return a.post(sent, size, false) },
		func() error {
			for seq := range sent + 1 {
				if err := b.expect(seq); err != nil {
					return err
				}
			}
			return nil
		})
}

// Kept messages stay as they are, oldest first, however many are dropped
// behind them.
func testKeepAndDrop(t *testing.T, mk Maker) {
	const count = 3000
	a, b := pair(t, mk)
	largest := min(a.maxMessage(), 2048)
	together(t,
		func() error {
			r := rand.New(rand.NewPCG(3, 3))
			for seq := range uint64(count) {
				if err := a.post(seq, minMessage+r.IntN(largest-minMessage+1), false); err != nil {
					return err
				}
			}
			return nil
		},
		func() error {
			r := rand.New(rand.NewPCG(4, 4))
			var kept []uint64
			release := func() error {
				if err := verify(b.Front(), kept[0]); err != nil {
					return fmt.Errorf("kept: %w", err)
				}
				b.release()
				kept = kept[1:]
				return nil
			}
			// Enough to have many kept, never so many that nothing flows.
			most := 40
			if b.lim.Window > 0 {
				most = b.lim.Window - session.ControlReserve - 1
			}
			for seq := range uint64(count) {
				for len(kept) > 0 && (len(kept) > most || r.IntN(3) == 0) {
					if err := release(); err != nil {
						return err
					}
				}
				var ev session.Event
				for !b.Poll(&ev) {
					// A ring may be full of what is kept, or of what was
					// dropped behind it.
					if len(kept) > 0 && r.IntN(2) == 0 {
						if err := release(); err != nil {
							return err
						}
						continue
					}
					if len(kept) > 0 {
						continue
					}
					b.Arm(session.RecvReady)
					if b.Poll(&ev) {
						break
					}
					if err := wait(b.recv, "message"); err != nil {
						return err
					}
				}
				if err := verify(ev.Msg, seq); err != nil {
					return err
				}
				if r.IntN(2) == 0 {
					b.Keep()
					kept = append(kept, seq)
				} else {
					b.drop()
				}
				if front := b.Front(); len(kept) == 0 {
					if front != nil {
						return fmt.Errorf("front of %d bytes though nothing is kept", len(front))
					}
				} else if err := verify(front, kept[0]); err != nil {
					return fmt.Errorf("front: %w", err)
				}
			}
			for len(kept) > 0 {
				if err := release(); err != nil {
					return err
				}
			}
			return nil
		})
}

// Arm, look once more, sleep: no wake-up is lost, over many rounds that always
// end in sleep at one side, and in both kinds of sleep at the same time.
func testWakeAfterArm(t *testing.T, mk Maker) {
	// Enough rounds to meet a window of some nanoseconds; where a round
	// takes long, as many as there is time for.
	const rounds, enough = 5000, time.Second
	const more, last = 0, 1 // what the numbers of messages say about another round
	a, b := pair(t, mk)
	together(t,
		func() error {
			began := time.Now()
			for seq, what := uint64(0), uint64(more); what == more; seq++ {
				if seq == rounds || time.Since(began) > enough {
					what = last
				}
				if err := a.post(seq<<1|what, 64, false); err != nil {
					return fmt.Errorf("ping %d: %w", seq, err)
				}
				if err := a.expect(seq); err != nil {
					return fmt.Errorf("pong: %w", err)
				}
			}
			return nil
		},
		func() error {
			for seq, what := uint64(0), uint64(more); what == more; seq++ {
				m, err := b.message()
				if err != nil {
					return fmt.Errorf("ping %d: %w", seq, err)
				}
				what = get64(m) & last
				if err := verify(m, seq<<1|what); err != nil {
					return fmt.Errorf("ping: %w", err)
				}
				b.drop()
				if err := b.post(seq, 64, false); err != nil {
					return fmt.Errorf("pong %d: %w", seq, err)
				}
			}
			return nil
		})
	// A full pipe in both directions: sleeps for room.
	size := a.maxMessage()
	flood := func(e *end) func() error {
		return func() error {
			for seq := range uint64(rounds / 10) {
				if err := e.post(seq, size, false); err != nil {
					return fmt.Errorf("flood %d: %w", seq, err)
				}
			}
			return nil
		}
	}
	drain := func(e *end) func() error {
		return func() error {
			for seq := range uint64(rounds / 10) {
				if err := e.expect(seq); err != nil {
					return err
				}
			}
			return nil
		}
	}
	together(t, flood(a), flood(b), drain(a), drain(b))
}

// The end of the connection wakes whether asked or not.
func testWakeAtTheEnd(t *testing.T, mk Maker) {
	for _, tt := range []struct {
		name string
		end  func(*end)
		want error
	}{
		{"Close", func(e *end) { e.Close() }, syscall.EPIPE},
		{"Abort", func(e *end) { e.Abort() }, syscall.ECONNRESET},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a, b := pair(t, mk)
			tt.end(a)
			deadline := time.Now().Add(patience)
			for b.Err() == nil {
				if time.Now().After(deadline) {
					t.Fatal("no wake-up of a peer that did not arm, and no error")
				}
				must(t, wait(b.recv, "end"))
			}
			if err := b.Err(); !errors.Is(err, tt.want) {
				t.Errorf("the peer finds %v, want %v", err, tt.want)
			}
		})
	}
}

// What arrives before Start is not lost.
func testBeforeStart(t *testing.T, mk Maker) {
	a, b := unstarted(t, mk)
	a.Start(a)
	must(t, a.post(0, 100, false))
	must(t, a.post(1, 100, true))
	b.Start(b)
	must(t, b.expect(0))
	must(t, b.expect(1))
}

// What was committed before Close arrives, and then EPIPE.
func testClose(t *testing.T, mk Maker) {
	for _, count := range []uint64{0, 1, 20} {
		t.Run(fmt.Sprint(count), func(t *testing.T) {
			a, b := pair(t, mk)
			together(t,
				func() error {
					for seq := range count {
						if err := a.post(seq, 300, false); err != nil {
							return err
						}
					}
					if err := a.Close(); err != nil {
						return err
					}
					return nil
				},
				func() error {
					for seq := range count {
						if err := b.expect(seq); err != nil {
							return err
						}
					}
					n, err := b.endOf()
					if n != 0 || !errors.Is(err, syscall.EPIPE) {
						return fmt.Errorf("after the last message: %d messages, %v; want 0, EPIPE", n, err)
					}
					if b.Reserve(minMessage, minMessage, true) != nil {
						return errors.New("there is room on a connection that ended")
					}
					return nil
				})
			for range 2 {
				if err := a.Close(); err != nil {
					t.Errorf("Close once more: %v", err)
				}
				a.Abort()
			}
			if err := b.Close(); err != nil {
				t.Errorf("Close of the second end: %v", err)
			}
		})
	}
}

// Close is not held up by a peer that does not poll, nor by what is kept here.
func testCloseDoesNotWait(t *testing.T, mk Maker) {
	a, b := pair(t, mk)
	must(t, b.post(0, session.MaxControl, true))
	_, err := a.message()
	must(t, err)
	a.Keep()
	must(t, b.post(1, session.MaxControl, true))
	_, err = a.message() // neither dropped nor kept
	must(t, err)
	must(t, a.post(0, session.MaxControl, true))
	closed := make(chan struct{}, 1)
	go func() { a.Close(); signal(closed) }()
	must(t, wait(closed, "Close"))
	must(t, b.expect(0))
	if _, err := b.endOf(); !errors.Is(err, syscall.EPIPE) {
		t.Errorf("the peer finds %v, want EPIPE", err)
	}
}

// The peer of Abort finds ECONNRESET, in the middle of whatever it does.
func testAbort(t *testing.T, mk Maker) {
	a, b := pair(t, mk)
	together(t,
		func() error {
			for seq := range uint64(30) {
				if err := a.post(seq, 300, false); err != nil {
					return err
				}
			}
			a.Abort()
			a.Abort()
			return a.Close()
		},
		func() error {
			for seq := uint64(0); ; seq++ {
				if err := b.expect(seq); err != nil {
					if !errors.Is(err, syscall.ECONNRESET) {
						return fmt.Errorf("want ECONNRESET: %w", err)
					}
					return nil
				}
			}
		})
	var ev session.Event
	if b.Poll(&ev) {
		t.Errorf("Poll gives %+v after it said that this was all", ev)
	}
}

func testNoAllocation(t *testing.T, mk Maker) {
	a, b := pair(t, mk)
	turn := func() {
		if a.post(0, 256, false) != nil || b.spinExpect(0) != nil ||
			b.post(0, 256, false) != nil || a.spinExpect(0) != nil {
			t.Error("lost")
		}
	}
	for range 100 { // pools fill
		turn()
	}
	if n := testing.AllocsPerRun(1000, turn); n > 0 {
		t.Errorf("%v allocations per round trip of messages", n)
	}
}

// spinExpect polls until message seq comes, and drops it. It has no bound but
// that of the test binary: a timer would allocate.
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
