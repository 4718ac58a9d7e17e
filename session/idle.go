package session

import (
	"sync"
	"sync/atomic"
	"time"
)

// idlePoller serves sessions while no Read or Write is in progress. A recently used session is on its
// list and not armed: arming on each return from Read would cost the peer a system call per message.
// After a tick without use, the idle poller arms the session, looks for messages once, and takes it off
// the list. Later a Wake that finds no waiting operation starts one goroutine, which looks and puts the
// session on the list again. So the peer's messages are acted on within two ticks of at most mostTick
// each, an idle connection costs nothing, and a busy one no system call.
type idlePoller struct {
	mu   sync.Mutex // guards the fields below
	list []*engine
	runs bool
}

// idlers is the idle poller of this process.
var idlers idlePoller

const (
	// tick is the shortest interval. Two intervals bound how long a peer's offer, credit or ping waits
	// while the application computes: short compared with a noticeable stall, long compared with the
	// microseconds that a tick costs.
	tick = 2 * time.Millisecond
	// mostTick: ticks are further apart, up to this, while all sessions are in use, and the application
	// itself polls those that are not rings; what a peer commits to a ring seldom needs an answer. A
	// tick wakes a thread, which wakes others to look for work, perhaps on the peer's processor.
	mostTick = 8 * tick
)

// idleState is the idle poller's state of a session.
type idleState struct {
	fresh    atomic.Bool // only notes have come so far, and each is waited for: the session stays armed
	unlisted atomic.Bool // not on the list: the next operation joins it
	serving  atomic.Bool // a service goroutine is about to look
	seen     uint64      // only for the idle poller: messages at the last tick
	polls    uint64      // only for the idle poller: receiver.polls at the last tick
}

// join puts s on the list.
func (j *idlePoller) join(s *engine) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.list = append(j.list, s)
	if !j.runs {
		j.runs = true
		go j.run()
	}
}

// run serves the list until it is empty.
func (j *idlePoller) run() {
	var batch []*engine
	for interval := tick; ; {
		time.Sleep(interval)
		j.mu.Lock()
		if len(j.list) == 0 {
			j.runs = false
			j.mu.Unlock()
			return
		}
		batch = append(batch[:0], j.list...)
		clear(j.list)
		j.list = j.list[:0]
		j.mu.Unlock()
		most := mostTick // bound of the next interval
		stay := batch[:0]
		for _, s := range batch {
			used, looked := s.pollIdle()
			if used {
				stay = append(stay, s)
			}
			if !used || !looked && !s.ring {
				most = tick
			}
		}
		interval = min(2*interval, most)
		j.mu.Lock()
		j.list = append(j.list, stay...)
		j.mu.Unlock()
		clear(batch)
	}
}

// pollIdle is the idle poller's poll of a session. used: the session stays on the list. looked: the
// application itself has polled since the last tick, or is about to.
func (e *engine) pollIdle() (used, looked bool) {
	i := &e.idle
	if s := e.rd.sleeper; s != nil {
		s.Rest() // events of this session, and of others for which it has waited, may have no waiter
	}
	if !e.tryLockRx() {
		return true, true
	}
	defer e.rxMu.Unlock()
	rx := &e.rx
	if rx.stage >= over {
		if rx.stage != closed { // if closed, the endpoint may be retired
			e.notifyEnd()
		}
		i.unlisted.Store(true)
		return false, false
	}
	// Polls before the session joined were not the application's.
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
	// The order matters. An operation that comes now either sees unlisted, and joins again at its
	// beginning or end; or its message, or what it found no room for, is seen below.
	i.unlisted.Store(true)
	e.ep.Arm(e.readWant())
	e.progressLocked()
	e.settleLocked()
	if e.readWant()&SendReady != 0 { // that look made something due for which there is no room
		e.ep.Arm(SendReady)
		e.sendPending()
	}
	e.notifyEnd()
	return false, false
}

// serve looks for messages while no operation waits. Wake calls it.
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
		e.idle.serving.Store(false) // this poll sees the reasons of earlier Wakes; later ones start another serve
		e.progressLocked()
		e.unlockRx()
		e.keep()
	}()
}

// keep makes the session be served from now on: by the idle poller, or, if it is fresh, by being armed
// and looked at once more.
func (e *engine) keep() {
	if e.idle.fresh.Load() {
		if s := e.rd.sleeper; s != nil {
			s.Rest()
		}
		e.ep.Arm(RecvReady)
		e.progress(true)
	} else {
		e.enlist()
	}
	e.notifyEnd() // the end may have come before
}

// enlist puts the session on the idle poller's list, unless it is there.
func (e *engine) enlist() {
	if e.idle.unlisted.Load() && e.idle.unlisted.CompareAndSwap(true, false) {
		e.idle.fresh.Store(false)
		e.idle.seen = 0
		idlers.join(e)
	}
}

// enlistPending is called at the end of an operation, so that what has found no room is sent even if
// the idle poller has taken the session off its list since.
func (e *engine) enlistPending() {
	if e.idle.unlisted.Load() && e.readWant()&SendReady != 0 {
		e.enlist()
	}
}
