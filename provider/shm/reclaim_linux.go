package shm

import (
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/provider/shm/internal/ring"
	"github.com/sanconn/san/session"
)

// tick is how often a link checks whether it is idle, and which of its rings are. Memory of a ring that
// was idle for two ticks is given back (link.mayPunch). It is a variable for tests.
var tick = time.Second

// reclaimer calls sweep at every tick, as long as there is something to give back.
type reclaimer struct {
	sweep    func() (again bool)
	sweeping sync.Mutex // held during sweep

	mu      sync.Mutex // guards the fields below
	timer   *time.Timer
	due     bool // a sweep is scheduled
	stopped bool
}

// schedule schedules a sweep, because there may be something to give back.
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
	r.due = false // before sweep looks: it may miss what is new from now on
	stopped := r.stopped
	r.mu.Unlock()
	if !stopped && r.sweep() {
		r.schedule()
	}
}

// stop ends the sweeps, and waits for one that is running.
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

// cachedPages is the memory that a connection has left in a slot's ring. The slot's next connection
// takes it over. Otherwise a program that makes a connection for each request would fault every page in
// again, which takes twice as long as the request. The pages count in the budget.
type cachedPages struct {
	mu    sync.Mutex // guards the fields below; held while pages are given back, for less than a millisecond
	bytes uint64     // so many bytes of the ring may have memory
	ticks int        // for how many ticks they stay
}

// cacheTicks is how many ticks a ring keeps pages for the slot's next connection.
const cacheTicks = 2

// put caches the pages of a ring, of which n bytes may have memory.
func (p *cachedPages) put(n uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.bytes, p.ticks = n, cacheTicks
}

// get returns how many bytes are cached, and takes them over.
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

// reclaim counts a tick, and calls punch for pages that were put cacheTicks ago. It reports whether it
// has to be called again.
func (p *cachedPages) reclaim(punch func(n uint64) bool) (again bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ticks--
	if p.bytes > 0 && p.ticks <= 0 && punch(p.bytes) {
		p.bytes = 0
	}
	return p.bytes > 0
}

// punchHole gives back the memory of a ring in which nothing is left to read, of a link with mayPunch.
// pages bytes of it may have memory, and are counted in the share.
func punchHole(mem []byte, pages uint64, memory ring.Share) bool {
	err := unix.Madvise(mem, unix.MADV_REMOVE)
	if err == unix.EINVAL { // by mlockall(MCL_CURRENT) since it was mapped
		_ = unix.Munlock(mem)
		err = unix.Madvise(mem, unix.MADV_REMOVE)
	}
	if err != nil {
		return false
	}
	memory.Return(pages)
	return true
}

// shrink gives back the pages of an idle ring. The reclaimer calls it. It reports whether it has to be
// called again.
func (e *endpoint) shrink() (again bool) {
	if !e.slot.accepted() { // what the peer has published as read is about the slot's last connection
		return true
	}
	again, met := e.out.Shrink(func(pages uint64) bool { return punchHole(e.slot.own.ring, pages, e.link.slots.memory) })
	if met {
		e.wake(session.SendReady)
	}
	return again
}

// sweep gives back memory of rings, of connections that are open or have ended, and closes a link that
// is idle. The peer loses nothing by that: what it has still to read stays in its own mapping.
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
