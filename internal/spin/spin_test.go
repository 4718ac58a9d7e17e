package spin

import (
	"runtime"
	"sync/atomic"
	"testing"
	"time"
)

// turns lets w take turns until polling ends, and returns how many there were.
func turns(t *testing.T, w *Wait) (n int) {
	t.Helper()
	for w.Turn() {
		if n++; n > 1<<30 {
			t.Fatal("polling does not end")
		}
	}
	return n
}

func begin(t *testing.T, h *History, limit time.Duration) *Wait {
	t.Helper()
	crowd.until.Store(0) // the load of this machine must not affect the test
	w := new(Wait)
	if !w.Begin(h, limit) {
		t.Fatal("the wait does not poll")
	}
	return w
}

func TestNoTimeMeansNoPolling(t *testing.T) {
	for _, limit := range []time.Duration{0, -1} {
		if new(Wait).Begin(new(History), limit) {
			t.Errorf("a wait polls for %v", limit)
		}
	}
}

func TestPollingEndsAtItsLimit(t *testing.T) {
	const limit = 200 * time.Microsecond
	best := time.Duration(1 << 62)
	for range 20 { // the best result: other programs may take the processor
		w := begin(t, new(History), limit)
		began := time.Now()
		turns(t, w)
		best = min(best, time.Since(began))
	}
	if best > 100*limit { // a yield may take several turns of the system's scheduler
		t.Errorf("a wait polled for %v instead of %v", best, limit)
	}
}

// Each wait in vain makes twice as many waits as the one before go without polling, up to maxSkip. A
// wait that polling has ended resets this.
func TestWaitsInVainPollLessAndLess(t *testing.T) {
	h := new(History)
	for want := 1; want <= 2*maxSkip; want *= 2 {
		turns(t, begin(t, h, time.Microsecond))
		skipped := 0
		for h.skip > 0 {
			if new(Wait).Begin(h, time.Microsecond) {
				t.Fatal("a wait polls that should not")
			}
			skipped++
		}
		if skipped != min(want, maxSkip) {
			t.Fatalf("%d waits did not poll, instead of %d", skipped, min(want, maxSkip))
		}
	}
	w := begin(t, h, time.Minute)
	w.Turn()
	w.End()
	turns(t, begin(t, h, time.Microsecond))
	if h.skip != 1 {
		t.Errorf("after a success %d waits do not poll, instead of 1", h.skip)
	}
}

// However a wait's polling ends, it is not counted as polling any more: otherwise others would not poll
// for good.
func TestOneProcessorIsLeftToWork(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(3))
	first, second := begin(t, new(History), time.Minute), begin(t, new(History), time.Microsecond)
	if new(Wait).Begin(new(History), time.Minute) {
		t.Error("three of three processors poll")
	}
	first.End()
	third := begin(t, new(History), time.Minute)
	turns(t, second)
	fourth := begin(t, new(History), time.Minute)
	third.End()
	fourth.End()
	if n := polling.Load(); n != 0 {
		t.Errorf("%d poll behind it", n)
	}
}

func TestOnTheOnlyProcessorOneMayPoll(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	w := begin(t, new(History), time.Minute)
	if new(Wait).Begin(new(History), time.Minute) {
		t.Error("two poll on one processor")
	}
	w.End()
}

// After a wait that PAUSE alone did not end, goroutines that are ready run before the first look: with
// one P, nothing else would run them. Otherwise a poll comes first, unless the runtime takes the P away,
// in which case the test is repeated. In every 61st turn the scheduler runs this goroutine first, so in
// one of two turns at most.
func TestOthersRunBeforeTheFirstLookBehindALongWait(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	for _, share := range []int{1, 0} {
		undisturbed(t, func() bool {
			ran := 0
			for range 2 {
				var other atomic.Bool
				w := begin(t, &History{share: share}, time.Minute)
				go other.Store(true)
				w.Turn()
				if other.Load() {
					ran++
				}
				for !other.Load() {
					runtime.Gosched()
				}
				w.End()
			}
			return ran > 0 == (share > 0)
		})
	}
}

// undisturbed runs try until it succeeds, because another program may take the processor from it at any
// time.
func undisturbed(t *testing.T, try func() bool) {
	t.Helper()
	for range 200 {
		if try() {
			return
		}
	}
	t.Error("200 times of 200 it did not")
}

// The time in which other goroutines run does not count as polling.
func TestTimeOfOthersIsNotPolling(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	const limit = 300 * time.Microsecond
	undisturbed(t, func() bool {
		w := begin(t, &History{share: 1}, limit)
		done := make(chan struct{})
		go func() {
			for began := time.Now(); time.Since(began) < 2*limit; {
			}
			close(done)
		}()
		goesOn := true
		for goesOn && w.others < int64(limit) {
			goesOn = w.Turn()
		}
		goesOn = goesOn && w.Turn()
		<-done
		if goesOn {
			w.End()
		}
		return goesOn
	})
}

// If other goroutines use all the time, there are too many, and polling ends.
func TestTooManyOthersEndPolling(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	const limit = 300 * time.Microsecond
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
				for began := time.Now(); time.Since(began) < limit; {
				}
				runtime.Gosched()
			}
		}
	}()
	turns(t, begin(t, &History{share: 1}, limit))
	close(stop)
	<-stopped
}

// After a wait that PAUSE alone did not end, other goroutines run first in the next shareWaits waits.
// Each of these that PAUSE ends counts.
func TestOthersRunFirstForSomeWaits(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1)) // otherwise a Gosched might wake a thread for an idle P
	undisturbed(t, func() bool {
		h := new(History)
		w := begin(t, h, time.Minute)
		for !w.yields {
			if !w.Turn() {
				return false
			}
		}
		if !w.Turn() {
			return false
		}
		w.End()
		shares := h.share
		for range shareWaits {
			w := begin(t, h, time.Minute)
			w.Turn()
			w.End()
		}
		return shares == shareWaits && h.share == 0
	})
}

func TestPaceIsMeasuredWithinReason(t *testing.T) {
	if p := measured(); p.each < 1 || p.micro < 1 || p.drain < p.each {
		t.Errorf("%+v", p)
	}
	Drain()
}

// A thread of another program that gets the processor by a yield keeps it for its time slice. Then
// nothing in this process polls for a while, which is twice as long if the same happens again soon.
func TestStrangersEndPollingForAWhile(t *testing.T) {
	forget := func() {
		crowd.until.Store(0)
		crowd.ended.Store(0)
		crowd.span.Store(0)
	}
	forget() // earlier tests may have recorded some
	defer forget()
	now := nanotime()
	for _, want := range []time.Duration{crowdedFirst, 2 * crowdedFirst, 4 * crowdedFirst} {
		noteStranger(now)
		if span := time.Duration(crowd.until.Load() - now); span != want {
			t.Errorf("nobody polls for %v, instead of %v", span, want)
		}
		now = crowd.until.Load()
	}
	crowd.until.Store(nanotime() + int64(time.Hour)) // on a busy machine the time may be over by now
	if new(Wait).Begin(new(History), time.Minute) {
		t.Error("somebody polls")
	}
	for range 20 {
		noteStranger(now)
		now = crowd.until.Load()
	}
	if span := time.Duration(crowd.span.Load()); span != crowdedMost {
		t.Errorf("nobody polls for %v, instead of %v", span, crowdedMost)
	}
	now += 2 * int64(crowdedMost)
	noteStranger(now)
	if span := time.Duration(crowd.until.Load() - now); span != crowdedFirst {
		t.Errorf("long after, nobody polls for %v, instead of %v", span, crowdedFirst)
	}
	crowd.until.Store(nanotime() - 1)
	begin(t, new(History), time.Minute).End()
}

// Drain takes time even without PAUSE.
func TestDrainTakesTime(t *testing.T) {
	best := time.Duration(1 << 62)
	for range 100 { // the best result: other programs may take the processor
		began := time.Now()
		Drain()
		best = min(best, time.Since(began))
	}
	if best < drainFor/4 {
		t.Errorf("it takes %v", best)
	}
}
