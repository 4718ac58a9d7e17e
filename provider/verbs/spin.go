package verbs

import (
	"os"
	"slices"
	"sync"
	"time"
)

// How long polling pays. A goroutine that sleeps until a completion comes is woken
// through an interrupt, a kernel thread, the runtime's poller and two goroutines. While
// both ends sleep, a round trip takes about twenty such wakes (rxe and siw in a guest):
// only a poll that lasts longer outlasts the other end's sleep, after which both stay
// awake. The time of a wake differs by more than an order of magnitude, from 5 µs to
// 0.1 ms in a guest, so it is measured, once.
const (
	spinWakes = 40
	minSpin   = 20 * time.Microsecond // a network's round trip
	maxSpin   = 5 * time.Millisecond
)

var spinTime = sync.OnceValue(func() time.Duration {
	return min(max(spinWakes*wakeTime(), minSpin), maxSpin)
})

// wakeTime is the time from a write into a pipe until a goroutine that slept in
// a Read of it runs, the median of several; 0: not known.
func wakeTime() time.Duration {
	const times = 9
	const asleep = 100 * time.Microsecond // long enough to have gone to sleep
	r, w, err := os.Pipe()
	if err != nil {
		return 0
	}
	defer w.Close()
	defer r.Close()
	if r.SetReadDeadline(time.Now().Add(time.Second)) != nil {
		return 0
	}
	woken := make(chan time.Time, 1)
	go func() {
		defer close(woken)
		for b := make([]byte, 1); ; {
			if _, err := r.Read(b); err != nil {
				return
			}
			woken <- time.Now()
		}
	}()
	var took []time.Duration
	for range times {
		time.Sleep(asleep)
		began := time.Now()
		if _, err := w.Write([]byte{0}); err != nil {
			return 0
		}
		at, ok := <-woken
		if !ok {
			return 0
		}
		took = append(took, at.Sub(began))
	}
	w.Close()
	<-woken // the goroutine has ended
	slices.Sort(took)
	return took[times/2]
}
