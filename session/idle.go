package session

import (
	"sync"
	"sync/atomic"
	"time"
)

// idlePoller serves sessions while no Read or Write is in progress. A recently used session is
// on its list and not armed: arming on each return from Read would cost the peer
// a system call per message. Once a tick passes without use, the idle poller arms it,
// looks for messages once, and takes it off the list; then a Wake that finds no
// waiter starts one goroutine, which looks and puts the session back on the list.
// So the peer's messages are acted on within two ticks (of up to ringTick or
// queueTick, see there), an idle connection costs nothing, and a busy one no system
// call.
type idlePoller struct {
	mu       sync.Mutex
	list     []*engine     // guarded by mu, as are all
	timer    *time.Timer   // of the next tick; nil: the idle poller does not run
	interval time.Duration // that timer was set to
}

// idlers is the one of this process.
var idlers idlePoller

const (
	// tick is the shortest interval. Two of them, or of the longer ones below, bound how
	// long a peer's offer, credit or ping waits for an application that computes: short
	// compared with a stall that is noticed, long compared with the microseconds
	// that a tick costs.
	tick = 2 * time.Millisecond
	// Ticks are further apart while all sessions are in use: up to ringTick where all
	// are rings, where little that a peer commits needs an answer; up to queueTick where
	// the application itself polls each of the others. A tick wakes a thread, which wakes
	// others to look for work, perhaps on the peer's processor.
	ringTick  = 16 * tick
	queueTick = 8 * tick
)

// idleState is what the idle poller keeps of a session.
type idleState struct {
	fresh    atomic.Bool // only notes have gone by it so far, and each is waited for: it stays armed
	unlisted atomic.Bool // off the list: the next operation joins it
	serving  atomic.Bool // a service goroutine is about to look
	seen     uint64      // the idle poller's: messages at the last tick
	polls    uint64      // the idle poller's: receiver.polls at the last tick
}

// join puts s on the list.
func (j *idlePoller) join(s *engine) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.list = append(j.list, s)
	switch {
	case j.timer == nil:
		j.interval = tick
		j.timer = time.NewTimer(tick)
		go j.run(j.timer)
	case j.interval > s.kind.tickMost:
		j.interval = tick
		j.timer.Reset(tick)
	}
}

// run ends when the list is empty.
func (j *idlePoller) run(t *time.Timer) {
	var batch []*engine
	for range t.C {
		j.mu.Lock()
		if len(j.list) == 0 {
			j.timer = nil
			j.mu.Unlock()
			return
		}
		batch = append(batch[:0], j.list...)
		clear(j.list)
		j.list = j.list[:0]
		j.mu.Unlock()
		most := ringTick // limit for the next interval
		stay := batch[:0]
		for _, s := range batch {
			used, looked := s.pollIdle()
			if used {
				stay = append(stay, s)
			}
			switch {
			case !used || !looked && s.kind.acks:
				most = tick
			default:
				most = min(most, s.kind.tickMost)
			}
		}
		j.mu.Lock()
		for _, s := range j.list { // those that came meanwhile
			if s.kind.acks {
				most = tick
			}
		}
		j.interval = min(2*j.interval, most)
		t.Reset(j.interval)
		j.list = append(j.list, stay...)
		j.mu.Unlock()
		clear(batch)
	}
}

// pollIdle is the idle poller's poll of a session. used: it stays on the list; looked: the
// application itself has polled since the last tick, or is about to.
func (e *engine) pollIdle() (used, looked bool) {
	i := &e.idle
	if s := e.rd.sleeper; s != nil {
		s.Rest() // its events, and others' that it has waited for, may have no waiter
	}
	if !e.tryLockRx() {
		return true, true
	}
	defer e.rxMu.Unlock()
	rx := &e.rx
	if rx.phase >= ended {
		if rx.phase != closed { // or the endpoint may be retired
			e.noteEnd()
		}
		i.unlisted.Store(true)
		return false, false
	}
	// Polls before it joined were not the application's.
	looked = i.seen != 0 && (rx.polls != i.polls || e.rd.op.held())
	defer func() { i.polls = rx.polls }()
	e.txMu.Lock()
	seen := 1 + rx.stats.messages + e.tx.stats.messages
	e.txMu.Unlock()
	if seen != i.seen {
		i.seen = seen
		if !looked { // the application uses the session, but does not poll
			e.progressLocked()
			e.settleLocked()
		}
		return true, looked
	}
	// Order matters: an operation that comes now either sees unlisted and joins again, at its
	// beginning or end, or its message, or what it found no room for, is seen below.
	i.unlisted.Store(true)
	e.ep.Arm(e.readWant())
	e.progressLocked()
	e.settleLocked()
	if e.readWant()&SendReady != 0 { // that made something due that finds no room
		e.ep.Arm(SendReady)
		e.sendPending()
	}
	e.noteEnd()
	return false, false
}

// serve looks for messages while no operation waits. It is called by Wake.
func (e *engine) serve() {
	if !e.idle.serving.CompareAndSwap(false, true) {
		return
	}
	if !e.workers.start() {
		return
	}
	go func() {
		defer e.workers.Done()
		e.lockRx()
		e.idle.serving.Store(false) // this poll sees what earlier Wakes were for; later ones start another
		e.progressLocked()
		e.unlockRx()
		e.noteEnd()
		if e.idle.fresh.Load() {
			e.watch()
		} else {
			e.enlist()
		}
	}()
}

// watch arms a fresh session, and looks at it once more.
func (e *engine) watch() {
	if s := e.rd.sleeper; s != nil {
		s.Rest()
	}
	e.ep.Arm(RecvReady)
	e.progress(true)
}

// enlist puts the session on the idle poller's list, if it is not there.
func (e *engine) enlist() {
	if e.idle.unlisted.Load() && e.idle.unlisted.CompareAndSwap(true, false) {
		e.idle.fresh.Store(false)
		e.idle.seen = 0
		idlers.join(e)
	}
}

// enlistPending is called at the end of an operation, so that what it found no room for is
// sent even if the idle poller has taken the session off its list since.
func (e *engine) enlistPending() {
	if e.idle.unlisted.Load() && e.readWant()&SendReady != 0 {
		e.enlist()
	}
}
