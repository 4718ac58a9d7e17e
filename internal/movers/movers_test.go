package movers

import (
	"cmp"
	"context"
	"errors"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sanconn/san/internal/hello"
	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/reason"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/session"
)

// testScheduler is the scheduler of a test.
type testScheduler struct {
	Scheduler
	ended sync.WaitGroup // done when all jobs have ended
	waits bool           // jobs wait until the other end has been accepted
}

const testTimeout = 30 * time.Second

var errEnded = &session.Unavailable{Reason: session.ReasonStays, Err: errors.New("it has ended")}

func peerAt(port uint16) netip.AddrPort { return netip.AddrPortFrom(netip.IPv6Loopback(), port) }

// job adds a job that moves a connection to a port and has that much time for its attempts. Each attempt
// is a call of move. done may be nil.
func (s *testScheduler) job(ctx context.Context, port uint16, left time.Duration, move func(context.Context) error, done func(*session.Unavailable)) {
	s.ended.Add(1)
	s.Add(&Job{
		Peer: peerAt(port), Ctx: ctx, Remaining: left, Waits: s.waits,
		Move: func(ctx context.Context) *session.Unavailable { return reason.Of(move(ctx)) },
		Done: func(why *session.Unavailable) {
			defer s.ended.Done()
			if done != nil {
				done(why)
			}
		},
	})
}

// isSlow reports whether a port counts as slow, once no job runs any more.
func (s *testScheduler) isSlow(t testing.TB, port uint16) (slow bool) {
	t.Helper()
	s.ended.Wait()
	testenv.Eventually(t, testTimeout, func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		if slow = s.slow[peerAt(port)]; s.running > 0 {
			return errors.New("one still runs")
		}
		return nil
	})
	return slow
}

// neverAnswers is an attempt to move to a process that is stopped.
func neverAnswers(ctx context.Context) error {
	<-ctx.Done()
	return ctx.Err()
}

func answers(context.Context) error { return errEnded }

// However many addresses have a process that does not answer, connections to others get a turn.
func TestSilentAddressesLeaveRoom(t *testing.T) {
	scheduler := new(testScheduler)
	for port := range uint16(2 * MostMoving) {
		scheduler.job(t.Context(), port, 10*time.Millisecond, neverAnswers, nil)
	}
	scheduler.ended.Wait()
	ctx, cancel := context.WithCancel(t.Context())
	for port := range uint16(2 * MostMoving) {
		scheduler.job(ctx, port, time.Hour, neverAnswers, nil)
	}
	answered := make(chan struct{})
	scheduler.job(ctx, 2*MostMoving, time.Hour, func(context.Context) error { close(answered); return errEnded }, nil)
	wantClosed(t, answered, "nobody else's has begun")
	cancel()
	scheduler.ended.Wait()
}

// If other addresses occupy all places without a pause, a few slow addresses still get turns at a time.
func TestSilentAddressesHaveTurns(t *testing.T) {
	scheduler := new(testScheduler)
	for port := range uint16(fewSlow) {
		scheduler.job(t.Context(), port, 10*time.Millisecond, neverAnswers, nil)
	}
	scheduler.ended.Wait()
	ctx, cancel := context.WithCancel(t.Context())
	begun, end := make(chan struct{}, 3*MostMoving), make(chan struct{})
	for range 3 {
		for port := range uint16(MostMoving) {
			scheduler.job(ctx, fewSlow+port, time.Hour, func(ctx context.Context) error {
				begun <- struct{}{}
				select {
				case <-end:
				case <-ctx.Done():
				}
				return errEnded
			}, nil)
		}
	}
	for range MostMoving {
		<-begun
	}
	had := make(chan struct{}, fewSlow)
	for port := range uint16(fewSlow) {
		scheduler.job(ctx, port, time.Hour, func(ctx context.Context) error { had <- struct{}{}; return neverAnswers(ctx) }, nil)
	}
	if running, _, _ := scheduler.Counts(); running > MostMoving {
		t.Errorf("%d move at a time", running)
	}
	for range MostMoving + fewSlow { // each of the others has its turn once
		end <- struct{}{}
	}
	for i := 0; i < fewSlow && !t.Failed(); i++ {
		wantClosed(t, had, "not all have their turn")
	}
	cancel()
	scheduler.ended.Wait()
}

// If no other address has a place, the slow ones get half of all places.
func TestSilentAddressesHaveHalf(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		scheduler := new(testScheduler)
		for port := range uint16(MostMoving) {
			scheduler.job(t.Context(), port, 10*time.Millisecond, neverAnswers, nil)
		}
		scheduler.ended.Wait()
		synctest.Wait()
		ctx, cancel := context.WithCancel(t.Context())
		for port := range uint16(MostMoving) {
			scheduler.job(ctx, port, time.Hour, neverAnswers, nil)
		}
		if running, _, _ := scheduler.Counts(); running != MostMoving/2 {
			t.Errorf("%d of them move at a time", running)
		}
		cancel()
		scheduler.ended.Wait()
	})
}

func wantClosed(t *testing.T, c <-chan struct{}, otherwise string) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(testTimeout):
		t.Error(otherwise)
	}
}

// An address counts as slow when an attempt that had enough time has used it up: all the time that a job
// has, or as long as a process may be silent. An attempt that ended early because its dial ended does
// not count.
func TestSlowIsWhoHadTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, of := range []struct {
			name       string
			dial, left time.Duration
			slow       bool
		}{
			{"a dial that is nearly over", 400 * time.Millisecond, time.Hour, false},
			{"a dial with time", time.Second, time.Hour, true},
			{"all the time of an attempt", time.Hour, 400 * time.Millisecond, true},
		} {
			scheduler := new(testScheduler)
			ctx, cancel := context.WithTimeout(t.Context(), of.dial)
			scheduler.job(ctx, 1, of.left, neverAnswers, nil)
			if slow := scheduler.isSlow(t, 1); slow != of.slow {
				t.Errorf("%s: slow is %v", of.name, slow)
			}
			cancel()
		}
	})
}

// The time that a job has left for its last attempt, after others for which its other end was not
// accepted, is too short to count.
func TestTheRestOfAJobIsNoTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		scheduler := new(testScheduler)
		scheduler.waits = true
		late := false
		scheduler.job(t.Context(), 1, 30*time.Millisecond, func(ctx context.Context) error {
			if end, _ := ctx.Deadline(); time.Until(end) > 10*time.Millisecond {
				return hello.ErrNotAccepted
			}
			late = true
			return neverAnswers(ctx)
		}, func(why *session.Unavailable) {
			if !errors.Is(why, hello.ErrNotAccepted) { // what an attempt with enough time has found
				t.Error(why)
			}
		})
		if slow := scheduler.isSlow(t, 1); slow || !late {
			t.Errorf("slow is %v, it was late: %v", slow, late)
		}
	})
}

// Such an attempt does not end an address's slowness either.
func TestTheRestOfAJobLeavesASlowAddressSlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		scheduler := new(testScheduler)
		scheduler.waits = true
		attempts := 0
		scheduler.job(t.Context(), 1, time.Second+50*time.Millisecond, func(ctx context.Context) error {
			attempts++
			ctx, cancel := context.WithTimeout(ctx, time.Second) // as an attempt's own timeout
			defer cancel()
			return neverAnswers(ctx)
		}, nil)
		if slow := scheduler.isSlow(t, 1); !slow || attempts < 2 {
			t.Errorf("slow is %v behind %d attempts", slow, attempts)
		}
	})
}

// Attempts that fail for a reason that may pass are repeated while the job has time. Any other result
// ends the job.
func TestWhatIsTriedAgain(t *testing.T) {
	undecided := hello.Answer{Code: hello.Unknown, Undecided: true}.Err()
	synctest.Test(t, func(t *testing.T) {
		for _, of := range []struct {
			err      error
			waits    bool
			attempts int
		}{
			{hello.ErrNotAccepted, true, 2},
			{hello.ErrUnknown, true, 2},
			{context.DeadlineExceeded, true, 2}, // an attempt's own timeout
			{undecided, false, 2},
			{hello.ErrNotAccepted, false, 1},
			{newconn.ErrNoAnswer, true, 1}, // it may still move
			{errEnded, true, 1},
		} {
			scheduler := new(testScheduler)
			scheduler.waits = of.waits
			attempts := 0
			scheduler.job(t.Context(), 1, time.Hour, func(context.Context) error {
				if attempts++; attempts == 1 {
					return of.err
				}
				return errEnded
			}, nil)
			if scheduler.isSlow(t, 1); attempts != of.attempts {
				t.Errorf("%v, waiting: %v: %d attempts", of.err, of.waits, attempts)
			}
		}

		scheduler := new(testScheduler)
		scheduler.waits = true
		began, attempts := time.Now(), 0
		scheduler.job(t.Context(), 1, 100*time.Millisecond, func(context.Context) error {
			attempts++
			time.Sleep(30 * time.Millisecond)
			return hello.ErrNotAccepted
		}, nil)
		scheduler.isSlow(t, 1)
		if took := time.Since(began); attempts < 3 || took > 130*time.Millisecond {
			t.Errorf("%d attempts in %v", attempts, took)
		}
	})
}

// A dial that ends while its job waits for the next attempt ends with the result of the last attempt.
func TestOverBetweenAttempts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		scheduler := new(testScheduler)
		scheduler.waits = true
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		scheduler.job(ctx, 1, time.Hour, func(context.Context) error {
			time.Sleep(time.Second - acceptPause/2)
			return hello.ErrNotAccepted
		}, func(why *session.Unavailable) {
			if !errors.Is(why, hello.ErrNotAccepted) {
				t.Error(why)
			}
		})
		scheduler.ended.Wait()
	})
}

// An address whose process answers that it has not decided is not slow.
func TestUndecidedIsNotSlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		scheduler := new(testScheduler)
		attempts := 0
		scheduler.job(t.Context(), 1, enoughTime+100*time.Millisecond, func(ctx context.Context) error {
			if attempts++; attempts > 1 {
				return neverAnswers(ctx) // for too short a time to count
			}
			time.Sleep(enoughTime)
			return hello.Answer{Code: hello.Unknown, Undecided: true}.Err()
		}, nil)
		if slow := scheduler.isSlow(t, 1); slow || attempts < 2 {
			t.Errorf("slow is %v behind %d attempts", slow, attempts)
		}
	})
}

// No more than mostSlow addresses are remembered as slow.
func TestSlowAddressesAreForgotten(t *testing.T) {
	var scheduler Scheduler
	scheduler.slow, scheduler.at = make(map[netip.AddrPort]bool), make(map[netip.AddrPort]int)
	for i := range 2 * mostSlow {
		scheduler.running, scheduler.at[peerAt(uint16(i))] = 1, 1
		scheduler.ran(peerAt(uint16(i)), true, true)
	}
	if n := len(scheduler.slow); n == 0 || n > mostSlow {
		t.Errorf("%d are", n)
	}
}

// A dial that has ended before its turn makes no attempt, and a slow address stays slow.
func TestOverBeforeItsTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		scheduler := new(testScheduler)
		scheduler.job(t.Context(), 1, 10*time.Millisecond, neverAnswers, nil)
		if !scheduler.isSlow(t, 1) {
			t.Fatal("not slow")
		}
		ctx, cancel := context.WithTimeout(t.Context(), 0)
		defer cancel()
		scheduler.job(ctx, 1, time.Hour, func(context.Context) error { t.Error("it is tried"); return errEnded }, func(why *session.Unavailable) {
			if why == nil || why.Reason != session.ReasonTimeout || !errors.Is(why, context.DeadlineExceeded) {
				t.Error(why)
			}
		})
		if !scheduler.isSlow(t, 1) {
			t.Error("not slow any more")
		}
		scheduler.job(t.Context(), 1, time.Hour, answers, nil)
		if scheduler.isSlow(t, 1) {
			t.Error("slow, though it has answered")
		}
	})
}

// After a peer has stood still once, so that dials were late, dials whose time is just sufficient are in
// time again soon.
func TestLateOnceIsNotLateForEver(t *testing.T) {
	for _, of := range []struct{ dial, stall time.Duration }{
		{60 * time.Millisecond, 100 * time.Millisecond},
		{time.Second, 1500 * time.Millisecond}, // longer than it takes to count as slow
	} {
		synctest.Test(t, func(t *testing.T) {
			const takes, each = 10 * time.Millisecond, 3030 * time.Microsecond // 330/s, where 400/s are possible
			scheduler := new(testScheduler)
			began := time.Now()
			stalls, goesOn := began.Add(time.Second), began.Add(time.Second+of.stall)
			move := func(ctx context.Context) error {
				until := time.Now().Add(takes)
				if !until.Before(stalls) && until.Before(goesOn) {
					until = goesOn
				}
				select {
				case <-time.After(time.Until(until)):
					return errEnded // the peer's answer
				case <-ctx.Done():
					return ctx.Err()
				}
			}
			var mu sync.Mutex
			late, lateAfter := 0, 0
			for time.Since(began) < 20*time.Second {
				dialed := time.Now()
				ctx, cancel := context.WithTimeout(t.Context(), of.dial)
				scheduler.job(ctx, 1, time.Hour, move, func(why *session.Unavailable) {
					cancel()
					if mu.Lock(); why.Reason == session.ReasonTimeout {
						if late++; dialed.Sub(goesOn) > 10*time.Second {
							lateAfter++
						}
					}
					mu.Unlock()
				})
				time.Sleep(each)
			}
			scheduler.ended.Wait()
			if late == 0 || lateAfter > 0 {
				t.Errorf("dials of %v: %d late, of these %d long after", of.dial, late, lateAfter)
			}
		})
	}
}

// The time during which a job waits for its turn does not count: it keeps that time for its next
// attempt.
func TestWaitingForATurnTakesNoTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const takes, most, jobs = 100 * time.Millisecond, 400 * time.Millisecond, 7 * MostMoving / 2
		scheduler := new(testScheduler)
		scheduler.waits = true
		var tries atomic.Int32
		move := func(ctx context.Context) error {
			if tries.Add(1) <= jobs {
				time.Sleep(takes)
				return hello.ErrNotAccepted
			}
			return cmp.Or(ctx.Err(), error(errEnded)) // the peer's answer
		}
		for range jobs {
			scheduler.job(t.Context(), 1, most, move, func(why *session.Unavailable) {
				if why != errEnded {
					t.Error(why)
				}
			})
		}
		scheduler.ended.Wait()
		if n := tries.Load(); n != 2*jobs {
			t.Errorf("%d tries of %d jobs", n, jobs)
		}
	})
}

// An address has no more places than it leaves to others: however many addresses are silent, and however
// many jobs they have, a job to another one begins.
func TestAnAddressLeavesRoom(t *testing.T) {
	scheduler := new(testScheduler)
	ctx, cancel := context.WithCancel(t.Context())
	begun := make(chan uint16, 2*MostMoving)
	running := make(map[uint16]int)
	for port := range uint16(6) { // each address gets half of what is left
		for range 2 * MostMoving {
			scheduler.job(ctx, port, time.Hour, func(ctx context.Context) error {
				begun <- port
				return neverAnswers(ctx)
			}, nil)
		}
		for range MostMoving / 2 >> port {
			running[<-begun]++
		}
	}
	for port, n := range running {
		if most := MostMoving / 2 >> port; n != most {
			t.Errorf("address %d: %d run, want %d", port, n, most)
		}
	}
	answered := make(chan struct{})
	scheduler.job(ctx, 6, time.Hour, func(context.Context) error { close(answered); return errEnded }, nil)
	wantClosed(t, answered, "nobody else's has begun")
	cancel()
	scheduler.ended.Wait()
}

// Addresses have their turns in rotation: the only job of an address does not wait for all jobs of other
// addresses that came before.
func TestAddressesTakeTurns(t *testing.T) {
	scheduler := new(testScheduler)
	ctx, cancel := context.WithCancel(t.Context())
	const others = MostMoving // they occupy all places
	begun, end := make(chan struct{}, 10*MostMoving), make(chan struct{})
	waits := func(ctx context.Context) error {
		begun <- struct{}{}
		select {
		case <-end:
			return errEnded
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	for range 10 {
		for port := range uint16(others) {
			scheduler.job(ctx, port, time.Hour, waits, nil)
		}
	}
	for range MostMoving {
		<-begun
	}
	single := make(chan struct{})
	scheduler.job(ctx, others, time.Hour, func(context.Context) error { close(single); return neverAnswers(ctx) }, nil)
	for range others + 1 { // each of the others may have its turn before
		end <- struct{}{}
	}
	wantClosed(t, single, "it waits for more")
	cancel()
	scheduler.ended.Wait()
}

// Jobs that wait for a slow address cost others nothing: however many wait, the line in which the next
// turn is looked up has one entry for them.
func TestWaitingCostsOthersNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		scheduler := new(testScheduler)
		scheduler.job(t.Context(), 1, 10*time.Millisecond, neverAnswers, nil)
		if !scheduler.isSlow(t, 1) {
			t.Fatal("not slow")
		}
		ctx, cancel := context.WithCancel(t.Context())
		const behind = 20_000
		for range behind + 1 { // one of them runs
			scheduler.job(ctx, 1, time.Hour, neverAnswers, nil)
		}
		for range 100 {
			answered := make(chan struct{})
			scheduler.job(ctx, 2, time.Hour, answers, func(*session.Unavailable) { close(answered) })
			wantClosed(t, answered, "it waits for others")
			scheduler.mu.Lock()
			if len(scheduler.line) > 1 || len(scheduler.at) > 2 || scheduler.waiting != behind {
				t.Errorf("%d in the line, and %d addresses with some that run, where %d wait", len(scheduler.line), len(scheduler.at), scheduler.waiting)
			}
			scheduler.mu.Unlock()
		}
		cancel()
		scheduler.ended.Wait()
	})
}

// The pauses before attempts for a connection that was not accepted yet grow, up to a bound.
func TestPausesGrow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		scheduler := &testScheduler{waits: true}
		var at []time.Time
		scheduler.job(t.Context(), 1, time.Second, func(context.Context) error {
			at = append(at, time.Now())
			return hello.ErrNotAccepted
		}, nil)
		scheduler.ended.Wait()
		want := acceptPause
		for i := range len(at) - 1 {
			if pause := at[i+1].Sub(at[i]); pause != want {
				t.Fatalf("the pause behind attempt %d is %v, not %v", i+1, pause, want)
			}
			want = min(2*want, mostPause)
		}
		if want != mostPause {
			t.Errorf("%d attempts, and then none for %v", len(at), want)
		}
	})
}

// An address that answers a later attempt of a job is not slow any more.
func TestAnAnswerBehindALateAttempt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		scheduler := &testScheduler{waits: true}
		attempts := 0
		scheduler.job(t.Context(), 1, time.Hour, func(ctx context.Context) error {
			if attempts++; attempts > 1 {
				return errEnded
			}
			time.Sleep(enoughTime)
			return context.DeadlineExceeded
		}, nil)
		if scheduler.isSlow(t, 1) || attempts != 2 {
			t.Errorf("the address is slow, behind %d attempts", attempts)
		}
	})
}
