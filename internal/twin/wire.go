package twin

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/sanconn/san/session"
)

// dice are the random streams of one end, one for each kind of choice.
type dice [diceCount]*rand.Rand

const (
	diceMessage = iota // when messages arrive
	diceAck            // when their places in the send queue are free
	diceRDMA           // when and in which pieces memory moves
	diceBusy           // which calls find the queue full
	diceShort          // how much Reserve gives
	diceMemory         // which Expose, Alloc, Read and Write fail; keys
	dicePoll           // which kind of event Poll takes first
	diceStray          // wakes for nothing
	diceEnd            // how long the notice of the peer's end takes
	diceLinger         // which calls linger, for how long
	diceControl        // which ReserveControls find no room
	diceOffer          // which memory pays whatever the size
	diceCount
)

func newDice(seed uint64, end int) (d dice) {
	for i := range d {
		d[i] = rand.New(rand.NewPCG(seed, uint64(end*diceCount+i)))
	}
	return d
}

func (d *dice) chance(which int, share float64) bool {
	// Drawn even when it cannot happen, so that a fault that is switched on does not change the other
	// choices of the stream.
	return d[which].Float64() < share
}

// wire is what lies between the two ends. Its lock guards everything in it and in its ends, and is held
// while memory moves: an access to a slice that the twin is moving races with a timer's goroutine,
// which the race detector reports.
type wire struct {
	cfg   Config
	start time.Time

	mu     sync.Mutex
	ends   [2]*Endpoint
	events events
	seq    uint64
	timer  *time.Timer
	ahead  time.Duration // added to the clock: by how much linger has advanced it
	cut    bool
	spare  []*message // recycled
}

// nowLocked returns the time since the start, with what linger has added.
func (w *wire) nowLocked() time.Duration { return time.Since(w.start) + w.ahead }

// latency draws a latency from a stream of an end.
func (w *wire) latency(d *dice, which int) time.Duration {
	l := w.cfg.MinLatency
	if span := w.cfg.MaxLatency - w.cfg.MinLatency; span > 0 {
		l += time.Duration(d[which].Int64N(int64(span) + 1))
	}
	if d.chance(which, w.cfg.Faults.Late) {
		l += w.cfg.Faults.LateBy
	}
	return l
}

// scheduleLocked schedules an event.
func (w *wire) scheduleLocked(when time.Duration, ev event) {
	ev.at, ev.seq = when, w.seq
	w.seq++
	w.events.push(ev)
	if w.events[0].seq == ev.seq {
		w.rearmLocked()
	}
}

// loseLocked drops the messages in flight to an end that were sent after an event was scheduled.
func (w *wire) loseLocked(to *Endpoint, after uint64) {
	lost := func(ev event) bool { return ev.kind == arrive && ev.end == to && ev.seq >= after }
	to.parked = slices.DeleteFunc(to.parked, lost)
	all := w.events
	w.events = nil
	for _, ev := range all {
		if !lost(ev) {
			w.events.push(ev)
		}
	}
}

func (w *wire) rearmLocked() {
	if len(w.events) == 0 {
		return
	}
	// Not 0: the goroutine that sets a timer of a synctest bubble for now runs it at
	// once, and the race detector dies of two that do so (runtime/time.go, modify and
	// unlockAndRun, share the bubble's raceCtx; Go 1.26).
	d := max(1, w.events[0].at-w.nowLocked())
	if w.timer == nil {
		w.timer = time.AfterFunc(d, w.run)
	} else {
		w.timer.Reset(d)
	}
}

// run performs what is due. All Wakes come from here: none from inside a call of the session's, and
// none with the lock held.
func (w *wire) run() {
	w.mu.Lock()
	now := w.nowLocked()
	for len(w.events) > 0 && w.events[0].at <= now {
		ev := w.events.pop()
		ev.end.happenLocked(ev)
	}
	var wakes [2]session.Events
	var wakers [2]session.Waker
	for i, e := range w.ends {
		wakes[i], e.wakes = e.wakes, 0
		wakers[i] = e.waker
		if e.waker == nil {
			e.wakes, wakes[i] = wakes[i], 0 // Start has not come yet
		}
	}
	if w.ends[0].endedLocked() && w.ends[1].endedLocked() {
		w.events = nil // there is nothing left to observe
	}
	w.rearmLocked()
	w.mu.Unlock()
	for i, bits := range wakes {
		if bits != 0 {
			wakers[i].Wake(bits)
		}
	}
}

// linger lets the wire, and what it wakes, progress by d while the caller is in the middle of a call.
// The caller may hold locks of the session's, and waiters for these keep a bubble's time from passing.
// So nothing sleeps here; the wire's clock is advanced. linger ends when nothing more has become due
// for some turns of all others, and not before the time given.
func (w *wire) linger(d, least time.Duration) {
	began := time.Now()
	w.mu.Lock()
	until := w.nowLocked() + d
	w.mu.Unlock()
	for idle := 0; idle < lingerTurns || time.Since(began) < least; idle++ {
		w.mu.Lock()
		due := len(w.events) > 0 && w.events[0].at <= until
		if due {
			w.ahead += max(0, w.events[0].at-w.nowLocked())
		}
		w.mu.Unlock()
		if due {
			idle = 0
			go w.run() // no Wake from inside a call of the session's
		}
		runtime.Gosched()
	}
}

const (
	// lingerMost latencies are enough for an answer, for what that allows, and for the end.
	lingerMost  = 8
	lingerTurns = 50
)

func (w *wire) violateLocked(kind ViolationKind, end int, format string, args ...any) {
	v := Violation{kind, end, fmt.Sprintf(format, args...)}
	if w.cfg.Violated == nil {
		panic("twin: " + v.String())
	}
	w.cfg.Violated(v)
}

// message is a message in flight or in a receive buffer.
type message struct {
	buf  []byte // as large as the largest message
	n    int    // bytes that count
	cost int    // bytes of the ring that it occupies
	done bool   // given back, but after one in the ring that is not

	control bool   // not data
	returns uint64 // a key of the receiver's; 0: none
}

func (w *wire) newMessageLocked(size int) *message {
	for i := len(w.spare) - 1; i >= 0; i-- {
		if m := w.spare[i]; len(m.buf) >= size {
			w.spare[i] = w.spare[len(w.spare)-1]
			w.spare = w.spare[:len(w.spare)-1]
			*m = message{buf: m.buf}
			return m
		}
	}
	return &message{buf: make([]byte, size)}
}

func (w *wire) recycleLocked(m *message) { w.spare = append(w.spare, m) }

// What a buffer holds that is not to be read.
const (
	noiseFreed  = 0xDB // given back
	noiseMoving = 0xA5 // the target of an RDMA that has not completed
)

func fill(b []byte, v byte) {
	for i := range b {
		b[i] = v
	}
}
