package endpointtest

import (
	"errors"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/sanconn/san/session"
)

// Arm, look again, sleep: no wake-up is lost, over many rounds that always end in a sleep at one end,
// and with both kinds of sleep at the same time.
func testWakeAfterArm(t *testing.T, mk Maker) {
	const rounds = 5000 // enough to meet a window of some nanoseconds
	a, b := pair(t, mk)
	together(t,
		func() error { return a.ping(rounds) },
		func() error { return b.pong() })
	// The queues are full in both directions: the ends sleep for room.
	const count = rounds / 10
	size := a.maxMessage()
	flood := func(e *end) func() error {
		return func() error {
			for seq := range uint64(count) {
				if err := e.post(seq, size); err != nil {
					return fmt.Errorf("flood %d: %w", seq, err)
				}
			}
			return nil
		}
	}
	drain := func(e *end) func() error { return func() error { return e.expectAll(count) } }
	together(t, flood(a), flood(b), drain(a), drain(b))
}

// The lowest bit of a ping says whether another round follows.
const more, last = 0, 1

// ping begins rounds. If a round takes long, it begins only as many as there is time for.
func (e *end) ping(rounds uint64) error {
	const enough = time.Second
	began := time.Now()
	for seq, what := uint64(0), uint64(more); what == more; seq++ {
		if seq == rounds || time.Since(began) > enough {
			what = last
		}
		if err := e.post(seq<<1|what, 64); err != nil {
			return fmt.Errorf("ping %d: %w", seq, err)
		}
		if err := e.expect(seq); err != nil {
			return fmt.Errorf("pong: %w", err)
		}
	}
	return nil
}

// pong answers pings up to the last.
func (e *end) pong() error {
	for seq, what := uint64(0), uint64(more); what == more; seq++ {
		m, err := e.message()
		if err != nil {
			return fmt.Errorf("ping %d: %w", seq, err)
		}
		what = get64(m) & last
		if err := verify(m, seq<<1|what); err != nil {
			return fmt.Errorf("ping: %w", err)
		}
		e.drop()
		if err := e.post(seq, 64); err != nil {
			return fmt.Errorf("pong %d: %w", seq, err)
		}
	}
	return nil
}

// The end of the connection wakes an end that is armed, for whatever event. An end that is not armed
// finds it by Poll and Err.
func testWakeAtTheEnd(t *testing.T, mk Maker) {
	for _, tt := range ways {
		t.Run(tt.name, func(t *testing.T) {
			for _, armed := range []session.Events{session.RecvReady, session.SendReady, 0} {
				a, b := pair(t, mk)
				b.Arm(armed)
				tt.end(a)
				for deadline := time.Now().Add(patience); b.Err() == nil; {
					if time.Now().After(deadline) {
						t.Fatalf("no error, with %v armed", armed)
					}
				}
				switch armed {
				case session.RecvReady:
					must(t, b.sleep(b.recv, "end"))
				case session.SendReady:
					must(t, b.sleep(b.send, "end"))
				}
				if err := b.Err(); !errors.Is(err, tt.want) {
					t.Errorf("the peer finds %v, want %v", err, tt.want)
				}
			}
		})
	}
}

// A token that does not come from the endpoint also ends a Sleep, however close it comes to the Sleep's
// beginning or to the endpoint's own token.
func testRouse(t *testing.T, mk Maker) {
	const rounds = 2000
	a, b := pair(t, mk)
	together(t,
		func() error { return a.ping(rounds) },
		func() error { return b.pong() },
		func() error {
			for range rounds {
				a.rouse(a.recv)
				b.rouse(b.recv)
				runtime.Gosched()
			}
			return nil
		})
	for range rounds {
		together(t,
			func() error { return a.sleep(a.recv, "token") },
			func() error { a.rouse(a.recv); return nil })
	}
}

// After Rest, wake-ups come without a Sleep.
func testRest(t *testing.T, mk Maker) {
	a, b := pair(t, mk)
	s := b.Endpoint.(session.Sleeper)
	for seq := range uint64(50) {
		together(t, func() error { return b.expect(2 * seq) }, func() error { return a.post(2*seq, 64) })
		b.Arm(session.RecvReady)
		s.Rest()
		must(t, a.post(2*seq+1, 64))
		must(t, wait(b.recv, "message behind a Rest"))
		must(t, b.expect(2*seq+1))
	}
}

// What arrives before Start is not lost.
func testBeforeStart(t *testing.T, mk Maker) {
	a, b := unstarted(t, mk)
	a.Start(a)
	must(t, a.post(0, 100))
	must(t, a.postControl(1, 100))
	b.Start(b)
	must(t, b.expect(0))
	must(t, b.expect(1))
}
