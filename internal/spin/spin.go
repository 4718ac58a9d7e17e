// Package spin decides how a wait polls before it sleeps. It is the same for a ring in shared memory
// and for a device.
//
// A peer that is working answers within a microsecond. So a wait first polls with PAUSE instructions
// between its looks, for pauseFor. Afterwards, between two looks, it lets other goroutines run and
// yields the processor to other threads, as the peer may share the processor. When the polling time is
// up, the caller arms the endpoint and sleeps.
//
// A yield that takes long shows that others need the processor. Then the wait sleeps at once, because
// the scheduler runs a woken sleeper ahead of them. If the yield takes as long as a time slice of
// another program, no wait in this process polls for a while, and longer each further time. After a
// wait that polling did not end, the next wait of its direction does not poll, and twice as many each
// further time. One processor is left to goroutines that work.
//
// After a wait that PAUSE alone did not end, the next waits let goroutines that are ready run first,
// and once a microsecond. A Read has often made one ready (net/http's reader does so with each
// response), which would otherwise not run before this one sleeps.
package spin

import (
	"math"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// pauseFor is longer than the peer's work between two messages, as in net/http, and shorter than
	// most context switches.
	pauseFor = 40 * time.Microsecond
	// pauseEach is the time between two looks with PAUSE: about what it costs to fetch the cache line
	// that the peer has written.
	pauseEach = 50 * time.Nanosecond
	// The longest that a yield may take is 1/crowdedShare of the polling time: two context switches and
	// a short piece of the peer's work.
	crowdedShare = 2
	// othersTake is longer than a Gosched that finds no goroutine to run. The time that other
	// goroutines run does not count as polling, up to othersShare times the polling time. Beyond that
	// there are too many of them.
	othersTake  = 2 * time.Microsecond
	othersShare = 8
	// shareWaits is how many waits let ready goroutines run first, after a wait that PAUSE alone did
	// not end. net/http reads a response of 100 KiB in a dozen Reads, most of which wait for a
	// microsecond; the requester is ready after the last one.
	shareWaits = 8
	// strangerTakes is longer than a peer with many connections works at a time, and shorter than a
	// time slice of the system's scheduler. A yield that takes as long has given another program a time
	// slice. Then polling ends for crowdedFirst, and longer each time, up to crowdedMost, so that fewer
	// than one wait in a hundred loses its processor that way.
	strangerTakes = 2 * time.Millisecond
	crowdedFirst  = 4 * time.Millisecond
	crowdedMost   = 256 * time.Millisecond
	// maxSkip is the most waits in a row that do not poll, so that an idle connection hardly polls.
	maxSkip = 64
	// drainFor is how long Drain pauses.
	drainFor = 1500 * time.Nanosecond
)

// pace has the times above in PAUSE instructions of this processor. One takes 2 ns on some processors,
// 50 ns on others, and 200 ns where it is emulated.
type pace struct {
	each  uint32 // PAUSEs between two looks
	micro int    // looks in a microsecond
	drain uint32 // PAUSEs in drainFor
}

var measured = sync.OnceValue(func() pace {
	const pauses = 64
	took := time.Duration(math.MaxInt64)
	for range 5 { // the least time counts, as disturbances only add time
		began := nanotime()
		procyield(pauses)
		took = min(took, time.Duration(nanotime()-began))
	}
	in := func(d time.Duration) uint32 { return uint32(max(1, d*pauses/max(1, took))) }
	each := in(pauseEach)
	return pace{each: each, micro: int(max(1, in(time.Microsecond)/each)), drain: in(drainFor)}
})

// polling counts the goroutines of this process that poll.
var polling atomic.Int32

// crowd is what this process has seen of other programs that need the processors.
var crowd struct {
	until atomic.Int64 // nanotime until which no wait polls; 0: waits may poll
	span  atomic.Int64 // the length of the present or last such time, ns
	ended atomic.Int64 // nanotime at which the present or last such time ends
}

// noteStranger ends polling for a while: for twice as long as the last time if that was recent.
func noteStranger(now int64) {
	span := crowd.span.Load()
	if now-crowd.ended.Load() > span {
		span = 0
	}
	span = min(max(2*span, int64(crowdedFirst)), int64(crowdedMost))
	crowd.span.Store(span)
	crowd.ended.Store(now + span)
	crowd.until.Store(now + span)
}

// isCrowded reports whether no wait may poll now.
func isCrowded() bool {
	until := crowd.until.Load()
	if until == 0 {
		return false
	}
	if nanotime() < until {
		return true
	}
	crowd.until.CompareAndSwap(until, 0)
	return false
}

// History is what one direction of a connection remembers of its waits.
type History struct {
	skip, penalty int // waits left that do not poll, and how many they were at first
	share         int // waits left that let other goroutines run first
}

// Wait is one wait that polls. One goroutine uses it, from Begin to End, or until Turn returns false.
type Wait struct {
	history *History
	pace    pace
	limit   int64 // polling time in ns
	looks   int   // looks with a PAUSE before them
	began   int64 // nanotime, about a microsecond after the first look; 0: not yet
	others  int64 // how long other goroutines ran, ns
	yields  bool  // the time of PAUSE alone is over: yield between looks
}

// Begin begins a wait that polls for at most limit. It returns false if this wait is not to poll: limit
// is 0, polling was in vain lately, other programs need the processors, or enough goroutines poll.
func (w *Wait) Begin(h *History, limit time.Duration) bool {
	if limit <= 0 {
		return false
	}
	if h.skip > 0 {
		h.skip--
		return false
	}
	if isCrowded() {
		return false
	}
	if polling.Add(1) > int32(max(1, runtime.GOMAXPROCS(0)-1)) {
		polling.Add(-1)
		return false
	}
	*w = Wait{history: h, pace: measured(), limit: int64(limit)}
	return true
}

// Again gives the wait its whole polling time once more: something has come, and more is expected.
func (w *Wait) Again() { *w = Wait{history: w.history, pace: w.pace, limit: w.limit} }

// End ends the wait, because something came before Turn returned false.
func (w *Wait) End() {
	h := w.history
	h.penalty = 0
	if w.yields || w.others > 0 {
		h.share = shareWaits
	} else if h.share > 0 {
		h.share--
	}
	polling.Add(-1)
}

// Turn passes the time until the next look. False: the wait has ended, and the caller is to sleep.
func (w *Wait) Turn() bool {
	if w.next() {
		return true
	}
	h := w.history
	h.share = shareWaits
	h.penalty = min(max(1, 2*h.penalty), maxSkip)
	h.skip = h.penalty
	polling.Add(-1)
	return false
}

func (w *Wait) next() bool {
	if w.yields {
		return w.yield()
	}
	if w.looks%w.pace.micro == 0 {
		if w.history.share > 0 && w.letRun() {
			return w.others < othersShare*w.limit
		}
		if !w.microsecond() {
			return false
		}
	}
	w.looks++
	procyield(w.pace.each)
	return true
}

// microsecond is called about once in a microsecond of PAUSEs. It reports whether polling time is left.
func (w *Wait) microsecond() bool {
	if w.looks == 0 {
		return true // most waits end before they need the time
	}
	now := nanotime()
	if w.began == 0 {
		w.began = now
	}
	polled := now - w.began - w.others
	w.yields = polled >= int64(pauseFor)
	return polled < w.limit
}

// yield lets others run, first goroutines of this process, then other threads, and reports whether to
// look again.
func (w *Wait) yield() bool {
	w.letRun()
	before := nanotime()
	osyield()
	now := nanotime()
	switch took := now - before; {
	case took > int64(strangerTakes):
		noteStranger(now)
		return false
	case took > w.limit/crowdedShare:
		return false
	}
	return now-w.began-w.others < w.limit && w.others < othersShare*w.limit
}

// letRun lets other goroutines run, and reports whether there were any.
func (w *Wait) letRun() bool {
	before := nanotime()
	runtime.Gosched()
	took := nanotime() - before
	if took < int64(othersTake) {
		return false
	}
	if w.began == 0 {
		w.began = before
	}
	w.others += took
	return true
}

// Drain pauses for drainFor. A Read that has emptied a stream of small messages does so before it looks
// again: an immediate look would take the ring's cache line from the writer for a single message.
func Drain() { procyield(measured().drain) }

var processStart = time.Now()

func nanotime() int64 { return int64(time.Since(processStart)) }
