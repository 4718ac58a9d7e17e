package session

import (
	"math"
	"runtime"
	"sync/atomic"
	"testing"
	"time"
)

// armed is an endpoint of which only Arm is used.
type armed struct{ Endpoint }

func (armed) Arm(Events) {}

// waits makes a session that only waits, for this or for a device.
func waits(device bool) *Session {
	s := &Session{ep: armed{}, cfg: Config{Spin: time.Minute}, pace: measurePace()}
	if device {
		s.pace.forDevice()
	}
	return s
}

// Behind a wait that was long, or in which others ran, goroutines that are ready come
// before polls: with one P, nobody else could run them. A device's polls come first,
// unless others wrote beside the last Reads.
func TestOthersRunBeforeTheNextPoll(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	write := func(s *Session) { s.Write([]byte("x")) }
	writev := func(s *Session) { s.WriteBuffers([][]byte{[]byte("x")}) }
	for _, tt := range []struct {
		name               string
		long, device, want bool
		beside             func(*Session)
	}{
		{name: "short"},
		{name: "long", long: true, want: true},
		{name: "device", long: true, device: true},
		{name: "device, Write beside", device: true, beside: write, want: true},
		{name: "device, WriteBuffers beside", device: true, beside: writev, want: true},
	} {
		ran := 0
		for range 2 { // the scheduler finds us first in every 61st turn
			s := waits(tt.device)
			s.rd.spin.long = tt.long
			if tt.beside != nil {
				s.wr.state.Store(stShut) // so that it ends at once
				s.rd.op.Lock()
				tt.beside(s)
				s.rd.op.Unlock()
			}
			var other atomic.Bool
			var w waiter
			s.pause(&w, &s.rd, RecvReady)
			go other.Store(true)
			s.pause(&w, &s.rd, RecvReady)
			if other.Load() {
				ran++
			}
			for !other.Load() {
				runtime.Gosched()
			}
			s.doneWaiting(&w, &s.rd)
		}
		if ran > 0 != tt.want {
			t.Errorf("%s: others ran in %d of 2", tt.name, ran)
		}
	}
}

// … and again while PAUSE goes on.
func TestOthersRunBetweenPolls(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	s := waits(false)
	s.rd.spin.long = true
	var w waiter
	s.pause(&w, &s.rd, RecvReady)
	for s.pause(&w, &s.rd, RecvReady); w.polite; {
		s.pause(&w, &s.rd, RecvReady)
	}
	var ran atomic.Bool
	go ran.Store(true)
	for range 4 * s.pace.polite { // the scheduler finds us first in every 61st turn
		s.pause(&w, &s.rd, RecvReady)
	}
	if !ran.Load() {
		t.Error("nobody else ran in four times politeEach")
	}
	s.doneWaiting(&w, &s.rd)
}

// What a wait was like decides how the next one begins.
func TestWaitRemembersWhetherItWasLong(t *testing.T) {
	for _, tt := range []struct {
		w    waiter
		want bool
	}{
		{waiter{phase: phaseSpin, tries: 3}, false},
		{waiter{phase: phaseSpin, tries: 3, others: 1}, true},
		{waiter{phase: phaseSpin, tries: 300, since: 1, last: 1}, true},
	} {
		s := waits(false)
		s.rd.spin.long = !tt.want
		spinning.Add(1)
		s.doneWaiting(&tt.w, &s.rd)
		if s.rd.spin.long != tt.want {
			t.Errorf("%+v: long %v", tt.w, !tt.want)
		}
	}
}

// Polling leaves a P to the others, but where there is one, or on a device.
func TestPollingLeavesAProcessor(t *testing.T) {
	for _, tt := range []struct {
		procs, polling int
		device, want   bool
	}{
		{1, 0, false, true}, {1, 1, false, false},
		{2, 0, false, true}, {2, 1, false, false},
		{4, 2, false, true}, {4, 3, false, false},
		{4, 3, true, true}, {4, 4, true, false},
	} {
		old := runtime.GOMAXPROCS(tt.procs)
		spinning.Add(int32(tt.polling))
		s := waits(tt.device)
		var w waiter
		s.pause(&w, &s.rd, RecvReady)
		if polls := w.phase == phaseSpin; polls != tt.want {
			t.Errorf("%+v: polls %v", tt, polls)
		} else if polls {
			s.doneWaiting(&w, &s.rd)
		}
		spinning.Add(-int32(tt.polling))
		runtime.GOMAXPROCS(old)
	}
	if n := spinning.Load(); n != 0 {
		t.Errorf("%d still poll", n)
	}
}

// Who lets others run sleeps when they take too much in all, or one takes long; then some
// of the next waits do not poll either.
func TestCrowdOfOthersEndsPolling(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	const spin = 50 * time.Microsecond
	for _, takes := range []time.Duration{20 * time.Microsecond, strangerTakes} {
		s := waits(false)
		s.cfg.Spin = spin
		s.rd.spin.long = true
		var stop atomic.Bool
		stopped := make(chan struct{})
		go func() {
			defer close(stopped)
			for !stop.Load() {
				for began := nanotime(); nanotime()-began < int64(takes); {
				}
				runtime.Gosched()
			}
		}()
		var w waiter
		for turns := 0; w.phase != phaseArmed; turns++ {
			if turns > 100 { // 20 of them are othersShare
				t.Fatalf("others take %v: it polls on", takes)
			}
			s.pause(&w, &s.rd, RecvReady)
		}
		least, skip := othersShare*spin, 1
		if w.stranger { // or another process had the processor meanwhile
			least, skip = strangerTakes, crowdedSkip
		}
		if others := time.Duration(w.others); others < least || s.rd.spin.skip != skip || takes == strangerTakes && !w.stranger {
			t.Errorf("others take %v: sleeps after %v of that, and for %d more waits; want %v and %d", takes, others, s.rd.spin.skip, least, skip)
		}
		stop.Store(true)
		<-stopped
	}
}

// A wait with nobody else to run polls for Config.Spin, whatever P is idle meanwhile; then
// the next one is known to be long.
func TestPollsForAsLongAsItIsTold(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(2))
	const spin = 20 * time.Millisecond
	best := time.Duration(0)
	for range 20 { // another process may have a processor meanwhile
		s := waits(false)
		s.cfg.Spin = spin
		began := nanotime()
		var w waiter
		for w.phase != phaseArmed {
			s.pause(&w, &s.rd, RecvReady)
		}
		if !s.rd.spin.long {
			t.Error("a wait that polling did not end was not long")
		}
		if best = max(best, time.Duration(nanotime()-began)); best >= spin {
			return
		}
	}
	t.Errorf("of 20 waits the longest polled for %v, want %v", best, spin)
}

// … though that be for ever: others that run are not too many then.
func TestPollsForEver(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	s := waits(false)
	s.cfg.Spin = math.MaxInt64
	s.rd.spin.long = true
	var w waiter
	s.pause(&w, &s.rd, RecvReady)
	for turns := range 10 {
		if s.pause(&w, &s.rd, RecvReady); w.phase == phaseSpin {
			continue
		}
		if !w.stranger { // or another process had the processor meanwhile
			t.Errorf("it sleeps after %d polls", turns)
		}
		return
	}
	s.doneWaiting(&w, &s.rd)
}

// What a wait usually takes is about the median: the few that take much longer, as one
// of the two ends did not run, do not count.
func TestUsualWait(t *testing.T) {
	var h spinHistory
	const usual, outlier = 300 * time.Microsecond, 5 * time.Millisecond
	for i := range 1000 {
		took := usual
		if i%5 == 0 {
			took = outlier
		}
		h.ended(&waiter{since: 1, last: 1 + int64(took)})
	}
	if got := time.Duration(h.usual); got < usual*2/3 || got > usual*3/2 {
		t.Errorf("usually %v, want about %v", got, usual)
	}
	for range 200 {
		h.ended(&waiter{})
	}
	if got := time.Duration(h.usual); got > time.Microsecond {
		t.Errorf("usually %v after 200 that took no time", got)
	}
}
