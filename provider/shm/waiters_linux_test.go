package shm

import (
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/session"
)

// testWaiters is a doorbell whose news go to channels, one for each slot, as they go to a session's
// waker.
type testWaiters struct {
	waiters
	ring   func(slot int)
	wakes  []chan struct{}
	served chan struct{}
}

func newWaiters(t *testing.T, slots int) *testWaiters {
	near, far := bells(t)
	a := &testWaiters{served: make(chan struct{})}
	for range slots {
		a.wakes = append(a.wakes, make(chan struct{}, 1))
	}
	a.ring = func(slot int) { near.ring(slot, session.RecvReady) }
	a.init(far, func(slot int, _ session.Events) { a.Rouse(a.wakes[slot]) })
	go func() {
		defer close(a.served)
		a.run()
	}()
	t.Cleanup(func() {
		a.stop()
		<-a.served
	})
	return a
}

// sleepOnce sleeps in the background. The channel is closed when it is woken.
func (a *testWaiters) sleepOnce(slot int) (woken chan struct{}) {
	woken = make(chan struct{})
	go func() {
		defer close(woken)
		a.Sleep(a.wakes[slot])
	}()
	return woken
}

// until waits for something that the waiters are about to do, and that no event reports.
func (a *testWaiters) until(t *testing.T, what string, is func() bool) {
	t.Helper()
	testenv.Eventually(t, patience, func() error {
		a.mu.Lock()
		defer a.mu.Unlock()
		if !is() {
			return errors.New(what + " did not come about")
		}
		return nil
	})
}

func expectWoken(t *testing.T, woken chan struct{}) {
	t.Helper()
	select {
	case <-woken:
	case <-time.After(patience):
		t.Fatal("nobody was woken")
	}
}

// leadAlone makes the only sleeper of a doorbell take the dispatcher's place.
func leadAlone(t *testing.T, a *testWaiters, slot int) (woken chan struct{}) {
	t.Helper()
	first := a.sleepOnce(slot)
	a.until(t, "a sleep", func() bool { return len(a.sleepers) == 1 })
	a.ring(slot)
	expectWoken(t, first)
	a.until(t, "the end of the dispatcher's turn", func() bool { return !a.led })
	woken = a.sleepOnce(slot)
	a.until(t, "a leader", func() bool { return a.leader != nil })
	return woken
}

// After the first time, the only sleeper waits at the doorbell itself.
func TestLoneSleeperWaitsAtTheDoorbell(t *testing.T) {
	a := newWaiters(t, 1)
	for range 20 {
		woken := leadAlone(t, a, 0)
		a.ring(0)
		expectWoken(t, woken)
		a.Rest() // the dispatcher waits again
	}
}

// A token that does not come from a ring also wakes the leader.
func TestRouseWakesTheLeader(t *testing.T) {
	a := newWaiters(t, 1)
	for range 20 {
		woken := leadAlone(t, a, 0)
		a.Rouse(a.wakes[0])
		expectWoken(t, woken)
		a.Rest()
	}
}

// When a leader leaves, the dispatcher waits for those that still sleep.
func TestLeaderLeavesSleepersToTheDispatcher(t *testing.T) {
	a := newWaiters(t, 2)
	leader := leadAlone(t, a, 0)
	other := a.sleepOnce(1)
	a.until(t, "a second sleep", func() bool { return len(a.sleepers) == 2 })
	a.Rouse(a.wakes[0])
	expectWoken(t, leader)
	a.ring(1)
	expectWoken(t, other)
}

// A leader passes on news for others.
func TestLeaderWakesOthers(t *testing.T) {
	a := newWaiters(t, 2)
	leader := leadAlone(t, a, 0)
	other := a.sleepOnce(1)
	a.until(t, "a second sleep", func() bool { return len(a.sleepers) == 2 })
	a.ring(1)
	expectWoken(t, other)
	a.ring(0)
	expectWoken(t, leader)
}

// After Rest, news are delivered although nobody sleeps.
func TestRestHasTheDispatcherWait(t *testing.T) {
	a := newWaiters(t, 2)
	woken := leadAlone(t, a, 0)
	a.Rouse(a.wakes[0])
	expectWoken(t, woken)
	a.until(t, "the leader's leaving", func() bool { return !a.led })
	a.ring(1)
	a.Rest()
	expectWoken(t, a.wakes[1])
}

// The dispatcher is about to stop waiting, because it has woken a sleeper. Rest makes it go on.
func TestRestKeepsTheDispatcher(t *testing.T) {
	var a waiters
	a.led, a.roused = true, true
	a.Rest()
	if !a.dispatches() {
		t.Error("the dispatcher leaves behind a rest")
	}
}

// However rings, tokens, sleeps and rests interleave, nobody sleeps for ever.
func TestNoSleeperIsForgotten(t *testing.T) {
	const slots, rounds = 4, 3000
	a := newWaiters(t, slots)
	turn := make([]chan struct{}, slots) // a sleep is about to begin
	for i := range turn {
		turn[i] = make(chan struct{})
	}
	var all sync.WaitGroup
	var slept atomic.Int64
	for slot := range slots {
		all.Go(func() {
			for range rounds {
				turn[slot] <- struct{}{}
				a.Sleep(a.wakes[slot])
				slept.Add(1)
			}
		})
		all.Go(func() {
			for i := range rounds {
				<-turn[slot]
				switch {
				case (i+slot)%7 == 0:
					a.Rouse(a.wakes[slot])
				case (i+slot)%11 == 0:
					a.Rest()
					a.ring(slot)
				default:
					a.ring(slot)
				}
			}
		})
	}
	done := make(chan struct{})
	go func() { all.Wait(); close(done) }()
	for before := int64(-1); before < slots*rounds; {
		select {
		case <-done:
			before = slots * rounds
		case <-time.After(patience):
			now := slept.Load()
			if now == before {
				t.Fatalf("a sleeper was forgotten, after %d sleeps", now)
			}
			before = now
		}
	}
	if a.unwoken != 0 || len(a.sleepers) != 0 {
		t.Errorf("%d sleepers at the end, %d of them not woken", len(a.sleepers), a.unwoken)
	}
}
