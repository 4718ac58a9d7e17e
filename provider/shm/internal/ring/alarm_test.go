package ring

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// An alarm causes one wake-up for each time that it is set, when its place is reached, and none after it
// is cleared.
func TestAlarmRingsOnce(t *testing.T) {
	for _, place := range []uint64{0, 8, 1<<34 - 8, 1 << 34, 1<<40 + 4096} {
		var a Alarm
		var r Rung
		if r.Ring(&a) || r.ringAt(&a, place) || r.waits(&a) {
			t.Fatal("an alarm that nobody has set")
		}
		for range 3 {
			a.Set(place)
			if place > 0 && r.ringAt(&a, place-8) {
				t.Errorf("%d: before its place", place)
			}
			if !r.waits(&a) || !r.ringAt(&a, place+800) {
				t.Errorf("%d: not at its place", place)
			}
			if r.waits(&a) || r.Ring(&a) || r.ringAt(&a, place+800) {
				t.Errorf("%d: twice", place)
			}
		}
		a.Set(place)
		if !r.Ring(&a) {
			t.Errorf("%d: not set again", place)
		}
		a.Set(place)
		a.clear()
		if a.isSet() || r.Ring(&a) || r.waits(&a) {
			t.Errorf("%d: behind clear", place)
		}
	}
}

// Two goroutines count in turns, and sleep while they wait for each other. Whoever sets an alarm, looks
// once more, and finds nothing is woken.
func TestNoWakeUpIsLost(t *testing.T) {
	type side struct {
		count atomic.Uint64
		alarm Alarm
		rung  Rung // for the other's alarm
		woken chan struct{}
	}
	sides := [2]*side{{woken: make(chan struct{}, 1)}, {woken: make(chan struct{}, 1)}}
	const rounds = 200_000
	// turn waits until the other side has counted to n, and counts on.
	turn := func(me, other *side, n, next uint64) bool {
		for spins := uint64(0); other.count.Load() < n; spins++ {
			if spins < n%5 {
				runtime.Gosched()
				continue
			}
			me.alarm.Set(0)
			if other.count.Load() >= n {
				break // without clear, as a session that has slept
			}
			select {
			case <-me.woken:
			case <-time.After(10 * time.Second):
				return false
			}
		}
		me.count.Store(next)
		if me.rung.Ring(&other.alarm) {
			select {
			case other.woken <- struct{}{}:
			default:
			}
		}
		return true
	}
	done := make(chan bool, 2)
	for i := range sides {
		go func() {
			ok := true
			for n := uint64(0); ok && n < rounds; n++ {
				ok = turn(sides[i], sides[1-i], n+uint64(i), n+1)
			}
			done <- ok
		}()
	}
	for range sides {
		if !<-done {
			t.Fatal("nobody was woken")
		}
	}
}

// A reader that arms, looks once more, and finds nothing is woken by the next message. A writer that
// finds no room is woken when some is freed. Both act at varying moments of each other's steps.
func TestWhoeverSleepsIsWoken(t *testing.T) {
	const rounds = 100_000
	p := newPipe(t, Start)
	var sent, seen atomic.Uint64
	var woken atomic.Bool
	until := func(is func() bool) bool {
		end := time.Now().Add(20 * time.Second)
		for n := 1; !is(); n++ {
			if n%256 == 0 {
				runtime.Gosched()
			}
			if n%1024 == 0 && time.Now().After(end) {
				return false
			}
		}
		return true
	}
	var writing sync.WaitGroup
	writing.Go(func() {
		for n := range uint64(rounds) {
			if !until(func() bool { return seen.Load() >= n }) || seen.Load() > n {
				return // the other side has given up
			}
			for range n * 7 % 50 { // at another moment in each round
				seen.Load()
			}
			if room, _ := p.Reserve(8, 8); room == nil {
				t.Error("no room")
				return
			}
			if do := p.Commit(8); do&Wake != 0 {
				woken.Store(true)
			}
			sent.Add(1)
		}
	})
	defer writing.Wait()
	for range rounds {
		msg, _ := p.Poll()
		for msg == nil {
			p.Reader.Arm()
			if msg, _ = p.Poll(); msg != nil {
				break
			}
			if !until(woken.Load) {
				t.Errorf("nobody was woken for message %d", sent.Load())
				seen.Store(1 << 40)
				return
			}
			woken.Store(false)
			msg, _ = p.Poll()
		}
		p.Reader.Disarm()
		p.Drop()
		seen.Add(1)
	}
}
