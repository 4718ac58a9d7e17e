package shm

import (
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/provider/shm/internal/ring"
	"github.com/sanconn/san/session"
)

// tick is how often a link checks whether it, or a ring that has grown, is idle. What was
// idle for two ticks is given back (link.mayPunch). It is a variable for tests.
var tick = time.Second

// reclaimer runs sweep at every tick, as long as there is something to give back.
type reclaimer struct {
	sweep    func() (again bool)
	sweeping sync.Mutex // held by sweep

	mu      sync.Mutex // guards what follows
	timer   *time.Timer
	due     bool // a sweep is to begin
	stopped bool
}

// schedule has sweep run: there may be something to give back.
func (r *reclaimer) schedule() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.due && !r.stopped {
		r.due = true
		r.timer = time.AfterFunc(tick, r.run)
	}
}

func (r *reclaimer) run() {
	r.sweeping.Lock()
	defer r.sweeping.Unlock()
	r.mu.Lock()
	r.due = false // before sweep looks: what is new from now on may be behind its look
	stopped := r.stopped
	r.mu.Unlock()
	if !stopped && r.sweep() {
		r.schedule()
	}
}

// stop ends the sweeps, and waits for one that runs.
func (r *reclaimer) stop() {
	r.mu.Lock()
	r.stopped = true
	if r.timer != nil {
		r.timer.Stop()
	}
	r.mu.Unlock()
	r.sweeping.Lock()
	defer r.sweeping.Unlock()
}

// cachedPages are the pages that a connection has left in a slot's ring. The next one on
// the slot takes them over. Programs that connect for each request would otherwise fault in
// every page again, which takes twice as long as the request. They count in the budget.
type cachedPages struct {
	mu    sync.Mutex // guards what follows; held while they are given back, for less than a millisecond
	bytes uint64     // how much of the ring may have memory
	ticks int        // for which they stay
}

// cacheTicks is how many ticks a ring keeps pages for the next connection.
const cacheTicks = 2

// put caches the pages of a ring of which n bytes may have memory.
func (p *cachedPages) put(n uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.bytes, p.ticks = n, cacheTicks
}

// get takes over what is cached.
func (p *cachedPages) get() (n uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	n, p.bytes = p.bytes, 0
	return n
}

// any reports whether anything is cached.
func (p *cachedPages) any() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.bytes > 0
}

// reclaim calls punch with what was put cacheTicks calls ago. It reports whether it has to run
// again.
func (p *cachedPages) reclaim(punch func(n uint64) bool) (again bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ticks--
	if p.bytes > 0 && p.ticks <= 0 && punch(p.bytes) {
		p.bytes = 0
	}
	return p.bytes > 0
}

// punchHole frees the memory of a ring with nothing left to read, of a link that may
// (link.mayPunch). pages is how much of it may have memory, which its share has counted.
func punchHole(mem []byte, pages uint64, memory ring.Share) bool {
	err := unix.Madvise(mem, unix.MADV_REMOVE)
	if err == unix.EINVAL { // locked since it was mapped, by mlockall(MCL_CURRENT)
		_ = unix.Munlock(mem)
		err = unix.Madvise(mem, unix.MADV_REMOVE)
	}
	if err != nil {
		return false
	}
	memory.Return(pages)
	return true
}

// shrink gives back the pages of an idle ring. The reclaimer calls it. It reports whether it
// has to run again.
func (e *endpoint) shrink() (again bool) {
	if !e.slot.accepted() { // what the peer says it has read is of the slot's last connection
		return true
	}
	again, met := e.out.Shrink(func(pages uint64) bool { return punchHole(e.slot.own.ring, pages, e.link.slots.memory) })
	if met {
		e.wake(session.SendReady)
	}
	return again
}

// sweep gives back memory of rings, in use or not, and ends a link that is idle. That
// takes nothing from the peer: what it has yet to read is in its own mapping.
func (l *link) sweep() (again bool) {
	if l.mayPunch {
		l.mu.Lock()
		reader := l.reader
		l.mu.Unlock()
		again = l.slots.reclaim(reader)
		for _, s := range l.slots.list() {
			if e := s.ep.Load(); e != nil && e.shrink() {
				again = true
			}
		}
	}
	return l.closeIdle() || again
}
