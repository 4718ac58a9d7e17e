package session

import (
	"sync"
	"sync/atomic"
	"time"
)

// Service while no Read or Write is in progress. A recently used session is on the
// janitor's list and not armed: arming on each return from Read would cost the peer
// a system call per message. Once a tick passes without use, the janitor arms it,
// looks for messages once, and takes it off the list; then a Wake that finds nobody
// waiting starts one goroutine, which looks and puts the session back on the list.
// So the peer's messages are acted on within two ticks (of up to busyTick or
// calmTick, see there), an idle connection costs nothing, and a busy one no system
// call.

// tick is the shortest interval. Two of them, or of the longer ones below, bound how
// long a peer's offer, credit or ping waits for an application that computes: short
// compared with a stall that anybody notices, long compared with the microseconds
// that a tick costs.
const tick = 2 * time.Millisecond

// Ticks are further apart while all sessions are in use: up to busyTick where all
// are rings, where little that a peer commits needs an answer; up to calmTick where
// the application itself polls each of the others. A tick wakes a thread, which wakes
// others to look for work, perhaps on the peer's core: one every 2 ms costs a stream
// on shm a fifth of its rate, and round trips over siw a third.
const (
	busyTick = 16 * tick
	calmTick = 8 * tick
)

type idleState struct {
	away    atomic.Bool // off the list: the next operation joins it
	serving atomic.Bool // a service goroutine runs
	seen    uint64      // janitor: messages at the last tick
	looks   uint64      // janitor: receiver.looks at the last tick
}

var janitor struct {
	sync.Mutex
	list     []*Session
	timer    *time.Timer   // of the next tick; nil: the janitor does not run
	interval time.Duration // that timer was set to
}

// join puts the session on the list, if it is not there.
func (i *idleState) join(s *Session) {
	if !i.away.CompareAndSwap(true, false) {
		return
	}
	i.seen = 0
	janitor.Lock()
	janitor.list = append(janitor.list, s)
	switch {
	case janitor.timer == nil:
		janitor.interval = tick
		janitor.timer = time.NewTimer(tick)
		go sweep(janitor.timer)
	case !s.lim.Ring() && janitor.interval > calmTick:
		janitor.interval = tick
		janitor.timer.Reset(tick)
	}
	janitor.Unlock()
}

// leftBehind is called at the end of an operation, so that what it found no room for is
// sent even if the janitor has taken the session off its list since.
func (s *Session) leftBehind() {
	if s.idle.away.Load() && s.readEvents()&SendReady != 0 {
		s.idle.join(s)
	}
}

// sweep is the janitor. It ends when the list is empty.
func sweep(t *time.Timer) {
	var batch []*Session
	for range t.C {
		janitor.Lock()
		if len(janitor.list) == 0 {
			janitor.timer = nil
			janitor.Unlock()
			return
		}
		batch = append(batch[:0], janitor.list...)
		clear(janitor.list)
		janitor.list = janitor.list[:0]
		janitor.Unlock()
		most := busyTick // limit for the next interval
		stay := batch[:0]
		for _, s := range batch {
			used, looked := s.idle.sweep(s)
			if used {
				stay = append(stay, s)
			}
			switch {
			case !used || !looked && !s.lim.Ring():
				most = tick
			case !s.lim.Ring():
				most = min(most, calmTick)
			}
		}
		janitor.Lock()
		for _, s := range janitor.list { // those that came meanwhile
			if !s.lim.Ring() {
				most = tick
			}
		}
		janitor.interval = min(2*janitor.interval, most)
		t.Reset(janitor.interval)
		janitor.list = append(janitor.list, stay...)
		janitor.Unlock()
		clear(batch)
	}
}

// sweep looks at one session. used: it stays on the list; looked: the application
// itself has polled since the last tick, or is about to.
func (i *idleState) sweep(s *Session) (used, looked bool) {
	if !s.rx.mu.TryLock() {
		return true, true
	}
	defer s.rx.mu.Unlock()
	if s.gone || s.failure.Load() != nil {
		i.away.Store(true)
		return false, false
	}
	// Polls before it joined were not the application's.
	looked = i.seen != 0 && (s.rx.looks != i.looks || s.rd.op.held())
	defer func() { i.looks = s.rx.looks }()
	s.tx.mu.Lock()
	seen := 1 + s.rx.messages + s.tx.messages
	s.tx.mu.Unlock()
	if seen != i.seen {
		i.seen = seen
		if !looked { // the application uses the session, but does not poll
			s.poll()
			s.serviceTx()
		}
		return true, looked
	}
	// Order matters: an operation that comes now either sees away and joins again, at its
	// beginning or end, or its message, or what it found no room for, is seen below.
	i.away.Store(true)
	s.ep.Arm(s.readEvents())
	s.poll()
	s.serviceTx()
	if s.readEvents()&SendReady != 0 { // polling made something due that finds no room
		s.ep.Arm(SendReady)
		s.flush()
	}
	return false, false
}

// serve looks for messages while no operation waits. It is called by Wake.
func (i *idleState) serve(s *Session) {
	if !i.serving.CompareAndSwap(false, true) {
		return
	}
	if !s.startWorker() {
		return
	}
	go func() {
		defer s.workers.Done()
		s.rx.mu.Lock()
		i.serving.Store(false) // this look sees what earlier Wakes were for; later ones start another
		s.look()
		s.rx.mu.Unlock()
		i.join(s)
	}()
}
