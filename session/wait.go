package session

import (
	"math"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

// Waiting: poll for a short while, since a peer that is at work answers within
// a microsecond; then ask the endpoint for a wake-up, look once more, and
// sleep on a channel, which needs no thread. An operation calls pause each time
// it got no further, and looks again when pause returns. One such call while
// polling is a turn.

// waiter is the state of one operation's waiting. Its zero value is ready.
type waiter struct {
	tries int   // turns with nothing but PAUSE
	since int64 // nanotime of the first turn after those; 0: not yet
	last  int64 // … of the end of the last turn
	gave  int64 // … of the beginning of the last turn that yielded to threads
	after int64 // how long after since yielding to threads begins, ns
	other bool  // a turn yielded to somebody other than the driver
	procs int32 // GOMAXPROCS when it began
	phase waitPhase

	polite bool // the next turn lets other goroutines run

	// Not used on a device:
	others   int64 // how long other goroutines ran, ns
	stranger bool  // the last turn took longer than strangerTakes
}

type waitPhase uint8

const (
	phaseNew waitPhase = iota
	phaseSpin
	phaseDone  // polling was not worth it, or its time is up
	phaseArmed // Arm was called: sleep next
)

// armed reports whether the next pause sleeps, so that this look must not be skipped.
func (w *waiter) armed() bool { return w.phase == phaseArmed }

const (
	// pauseFor is how long a wait polls with only PAUSE in between (on a device it does
	// so minTries times) before it also yields. It covers a small piece of the peer's
	// work, but not the one in a hundred that a context switch prolongs.
	// pauseEach is the time between two polls: about what fetching the cache line that
	// the peer has written costs; with ten times as much a round trip takes twice as long.
	pauseFor  = 15 * time.Microsecond
	pauseEach = 50 * time.Nanosecond
	minTries  = 4
	// 1/crowdedShare of Config.Spin is the longest that yielding may take: two context
	// switches and a short piece of the peer's or the device's work. If it takes longer,
	// others want this processor; polling then only loses our turn to them, while a
	// sleeper is woken ahead of them. At first it is believed for a few waits only,
	// which do not poll: crowdedSkip if the turn took strangerTakes, which is longer
	// than the peer's piece of work and shorter than the system scheduler's slice;
	// otherwise one, as it may have been the peer or the device's driver, for which
	// sleeping costs many times as much.
	crowdedShare  = 2
	crowdedSkip   = 8
	strangerTakes = 500 * time.Microsecond
	// politeEach is the time between turns that let other goroutines run while still
	// using PAUSE, in a wait after one that PAUSE alone did not end. A goroutine that
	// this one has made ready, as net/http's reader does with the one that asked, is
	// next on this P: until we leave it, only a thread that has to be woken could take
	// it away. The time that others run does not count as polling, up to othersShare
	// times Config.Spin: then there are too many. A Gosched that finds nobody mostly
	// takes less than othersTake, though it may wake a thread for an idle P.
	politeEach  = time.Microsecond
	othersTake  = 2 * time.Microsecond
	othersShare = 8
	// giveEach is the time between the beginnings of two turns that yield to threads on a
	// device. A software device's driver may be a thread that can run on this processor
	// only: polling on would keep ourselves waiting. If the driver did take the
	// processor, the next turn yields again. Yielding more often slows the driver's work
	// on other processors. A driver that preempts us (slice_linux.go) does not need it:
	// yielding then begins after giveUsual times the usual wait, and after longWait at
	// the latest, for the sake of a peer that has come to share this processor.
	giveEach  = 50 * time.Microsecond
	giveUsual = 2
	// peerTakes is longer than a piece of the driver's work: a turn that yielded for
	// so long did so to the peer, or to somebody else who wants this processor.
	peerTakes = 2 * giveEach
	// yieldEach is below the 10 ms after which the runtime's monitor preempts a polling
	// goroutine, takes its P while it is in a cgo call, and then looks every 20 µs for a
	// while (runtime/proc.go, retake and sysmon). It is not much below, as a Gosched
	// wakes a thread if a P is idle.
	yieldEach = 8 * time.Millisecond
	// besideWaits is how many waits begin by letting other goroutines run, after a Read
	// during which others wrote: net/http reads one response with several Reads.
	besideWaits = 4
	// longWait is when a wait on a device yields to goroutines for the first time: it
	// bounds the delay of one made ready on this P, perhaps by us, while no other P is
	// idle to take it. Nearly all waits for a peer at work end earlier.
	longWait = time.Millisecond
	// maxSkip is the most waits in a row that do not poll after polling was in
	// vain, so that an idle connection hardly polls.
	maxSkip = 64
)

// pollPace is pauseFor and pauseEach in terms of the processor's PAUSE, which takes
// 2 ns on some processors, 50 ns on others, and 200 ns where it is emulated.
type pollPace struct {
	tries int    // polls with only PAUSEs between them
	each  uint32 // PAUSEs between two polls; 0: none
	drain uint32 // PAUSEs that paceFor takes
	slow  bool   // a single one takes longer than pauseEach

	polite int // polls in politeEach; 0: on a device

	// device: what we wait for comes from another host, or from a kernel thread. Yield
	// to threads every giveEach, and to goroutines after longWait and every yieldEach,
	// or, after pauseFor, in every turn if all Ps poll: Gosched wakes a thread for an
	// idle P, which finds nothing to do, on a processor that the driver may need.
	// Otherwise the peer is a process of this host that may share our processor, and
	// yielding in every turn is what moves us to another one.
	device bool
}

var measurePace = sync.OnceValue(func() pollPace {
	const pauses = 64
	each := time.Duration(math.MaxInt64)
	for range 5 { // the minimum, as any disturbance makes it longer
		began := nanotime()
		procyield(pauses)
		each = min(each, time.Duration(nanotime()-began))
	}
	in := func(d time.Duration) uint32 { return uint32(max(1, d*pauses/max(1, each))) }
	p := pollPace{each: in(pauseEach), drain: in(paceFor), slow: each > pauses*pauseEach}
	p.tries = int(max(minTries, in(pauseFor)/p.each))
	p.polite = int(max(1, in(politeEach)/p.each))
	return p
})

// forDevice changes the pace for devices, where a poll itself costs more than fetching
// a cache line. A slow PAUSE traps to the hypervisor, or lets the emulator's other
// threads run, which takes time from the driver.
func (p *pollPace) forDevice() {
	p.device, p.polite = true, 0
	p.tries = min(p.tries, minTries)
	if p.slow {
		p.each = 0
	}
}

// relax pauses between two polls.
func (p *pollPace) relax() {
	if p.each > 0 {
		procyield(p.each)
	}
}

// spinHistory lets a direction stop polling when it does not pay, and yield in time
// when it does.
type spinHistory struct {
	skip, penalty int   // waits left that do not poll, and how many there were at first
	long          bool  // in the last wait others ran, or PAUSE alone did not end it
	share         int   // on a device: waits left that let others run first
	yielded       int64 // nanotime of the last Gosched, or since when it waits often
	usual         int64 // about the median of waits that polling has ended, ns after since
}

// ended learns from the length of a wait that polling has ended. If it ended because
// somebody else finally got this processor, it shows that yielding began too late, not
// how long the answer took.
func (h *spinHistory) ended(w *waiter) {
	if w.last-w.since > h.usual && !w.other {
		h.usual += h.usual/8 + 1
	} else {
		h.usual -= h.usual / 8
	}
}

// spinning counts the goroutines of this process that poll.
var spinning atomic.Int32

// mayPoll is how many may poll at once. One P is left to those who work and to wake-ups;
// polls for a device may take all, for there each sleep is expensive.
func (p *pollPace) mayPoll(procs int32) int32 {
	if p.device {
		return procs
	}
	return max(1, procs-1)
}

// pause waits a little, or until there may be something to do.
func (s *Session) pause(w *waiter, sd *side, ev Events) {
	switch w.phase {
	case phaseNew:
		w.phase = phaseDone
		if s.cfg.Spin > 0 {
			if sd.spin.skip > 0 {
				sd.spin.skip--
			} else if w.procs = int32(runtime.GOMAXPROCS(0)); spinning.Add(1) <= s.pace.mayPoll(w.procs) {
				w.phase = phaseSpin
				w.polite = sd.isPolite(&s.pace)
				return
			} else {
				spinning.Add(-1)
			}
		}
		s.arm(w, sd, ev)
	case phaseSpin:
		if s.spinOn(w, sd) {
			return
		}
		spinning.Add(-1)
		least := 1
		if w.stranger {
			least = crowdedSkip
		}
		sd.spin.long = true
		sd.spin.penalty = min(max(least, 2*sd.spin.penalty), maxSkip)
		sd.spin.skip = sd.spin.penalty
		s.arm(w, sd, ev)
	case phaseDone:
		s.arm(w, sd, ev)
	case phaseArmed:
		if uint32(ev)&^sd.wants.Load() != 0 { // since the last look there is more to wait for
			s.arm(w, sd, ev)
			return
		}
		sd.sleeps.Add(1)
		<-sd.wake
		w.phase = phaseDone
	}
}

func (s *Session) arm(w *waiter, sd *side, ev Events) {
	sd.wants.Store(uint32(ev))
	s.ep.Arm(ev)
	w.phase = phaseArmed
}

// spinOn takes one more turn, or reports false when the time for polling is up. At first
// it only PAUSEs, then it yields to other goroutines and threads (on a device now and
// then), as a peer that shares this core cannot run while we PAUSE.
func (s *Session) spinOn(w *waiter, sd *side) bool {
	limit, pace, h := s.cfg.Spin, &s.pace, &sd.spin
	if w.polite && pace.device {
		w.polite = false
		runtime.Gosched()
		return true
	}
	if w.polite {
		w.polite = w.letRun() > 0
		return !w.stranger && w.others/othersShare < int64(limit)
	}
	w.tries++
	if w.tries < pace.tries {
		w.polite = h.long && pace.polite > 0 && w.tries%pace.polite == 0
		pace.relax()
		return true
	}
	if w.since == 0 {
		w.since = nanotime()
		w.last, w.gave = w.since, w.since
		if w.since-h.yielded > 2*int64(yieldEach) {
			h.yielded = w.since // it seldom waits: no Gosched at its first turn
		}
		w.after = int64(giveEach)
	}
	waited := w.last - w.since
	crowd := !pace.device || waited > int64(pauseFor) && spinning.Load() >= w.procs
	if crowd || w.last-h.yielded > int64(yieldEach) || waited > int64(longWait) && h.yielded <= w.since {
		h.yielded = w.last
		if pace.device {
			runtime.Gosched()
		} else if w.last += w.letRun(); w.stranger { // w.last moves on: took measures threads alone
			return false
		}
	}
	gives := crowd || waited > w.after && w.last-w.gave > int64(giveEach)
	if gives {
		w.gave = w.last
		osyield()
	} else {
		pace.relax()
	}
	now := nanotime()
	took := now - w.last
	w.other = w.other || gives && took > int64(peerTakes)
	if took > int64(limit/crowdedShare) {
		w.stranger = took > int64(strangerTakes) && !pace.device
		return false
	}
	w.last = now
	return now-w.since < int64(limit)
}

// writesBeside notes, on a device, a Write that begins during a Read: then other
// goroutines write what is answered, and have to run first. Where the reader writes
// too, a Gosched would only wake a thread.
func (s *Session) writesBeside() {
	if s.pace.device && s.rd.op.held() && !s.rd.beside.Load() {
		s.rd.beside.Store(true)
	}
}

// isPolite reports whether a wait that begins lets other goroutines run first.
func (sd *side) isPolite(pace *pollPace) bool {
	h := &sd.spin
	if !pace.device {
		return h.long
	}
	if sd.beside.Load() {
		sd.beside.Store(false)
		h.share = besideWaits
	}
	if h.share == 0 {
		return false
	}
	h.share--
	return true
}

// letRun lets other goroutines run, and returns for how long, in ns; 0: there were none.
func (w *waiter) letRun() int64 {
	began := nanotime()
	runtime.Gosched()
	took := nanotime() - began
	if took < int64(othersTake) {
		return 0
	}
	w.others += took
	w.stranger = took > int64(strangerTakes)
	return took
}

// succeeded notes that polling has ended a wait.
func (h *spinHistory) succeeded(w *waiter) {
	h.penalty = 0
	h.long = w.others > 0 || w.since != 0
}

// progress notes that the operation got further: waiting begins anew.
func (w *waiter) progress(sd *side) {
	if w.phase == phaseSpin {
		sd.spin.succeeded(w)
		w.tries, w.since, w.others = 0, 0, 0
	}
}

// doneWaiting ends an operation's waiting.
func (s *Session) doneWaiting(w *waiter, sd *side) {
	switch w.phase {
	case phaseNew:
		return
	case phaseSpin:
		spinning.Add(-1)
		sd.spin.succeeded(w)
		if sd == &s.rd {
			sd.spin.ended(w)
		}
		sd.polls.Add(1)
	case phaseArmed:
		s.disarm(sd)
	}
	if sd.wants.Load() != 0 {
		sd.wants.Store(0)
		if s.idle.away.Load() {
			s.idle.join(s)
		}
	}
}

// disarm takes back what this direction asked to be woken for, unless the other
// direction waits for it too.
func (s *Session) disarm(sd *side) {
	other := &s.rd
	if sd == other {
		other = &s.wr
	}
	ev := Events(sd.wants.Load()) &^ Events(other.wants.Load())
	if ev == 0 {
		return
	}
	s.ep.Disarm(ev)
	if ev &= Events(other.wants.Load()); ev != 0 { // it has asked in between
		s.ep.Arm(ev)
		other.signal()
	}
}

var processStart = time.Now()

func nanotime() int64 { return int64(time.Since(processStart)) }
