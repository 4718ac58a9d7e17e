package san

import (
	"cmp"
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sanconn/san/internal/newconn"
)

const (
	// mostMoving bounds how many connections move at a time, mostToOne those to one address and
	// port, whose process may be stopped: behind an attempt that has run out of time, one at a
	// time, and mostSilent to all such. The others wait for their turn, and are used meanwhile:
	// a device that makes its queue pairs one by one is asked for no more than that at once.
	mostMoving = 16
	mostToOne  = mostMoving / 4
	mostSilent = mostMoving / 2

	// enoughTime is how long an attempt must have had to say that a peer does nothing, if its dial
	// had less than all of an attempt's time left; at most as long as sanconn waits for that.
	enoughTime = 500 * time.Millisecond

	mostSlow = 1 << 12 // addresses that are remembered for that; then all are forgotten

	// acceptPause is how long a connection that was not accepted yet is left alone, at first;
	// mostPause bounds its doubling, so that a dial that waits notices the accept.
	acceptPause = 50 * time.Microsecond
	mostPause   = 20 * time.Millisecond
)

// job is a connection that is to move.
type job struct {
	plan  *plan
	h     newconn.Handle
	life  *life
	ctx   context.Context
	waits bool               // for its other end to be accepted; each one waits for a listener's condition
	done  func(*Unavailable) // called once; nil: it moves. It does not block

	// Set by movers.
	peer  netip.AddrPort // guarded by their mu
	left  time.Duration  // of its time, which passes while it runs or pauses, not while it waits for its turn
	pause time.Duration  // the last one

	passing atomic.Pointer[Unavailable] // why it waits
}

// run is an attempt to move, if there is time left for one: tried. slow: it has run out of time,
// and had enough. One whose dial was nearly over says nothing of the peer.
func (j *job) run(m *moverPool) (tried, slow bool) {
	began := time.Now()
	ctx, cancel := context.WithTimeout(j.ctx, j.left)
	defer cancel()
	if ctx.Err() != nil {
		j.done(cmp.Or(j.passing.Load(), unavailableOf(ctx.Err())))
		return false, false
	}
	why := j.plan.move(ctx, j.h, j.life)
	undecided := why != nil && errors.Is(why, errUndecided)
	slow = why != nil && why.Reason == ReasonTimeout && !undecided && time.Since(began) >= min(j.left, enoughTime)
	if why != nil && (j.waits && isPassing(why) || undecided) {
		if ctx.Err() == nil {
			j.passing.Store(why)
			j.pause = min(max(2*j.pause, acceptPause), mostPause)
			j.left -= time.Since(began) + j.pause
			time.AfterFunc(j.pause, func() { m.add(j) })
			return true, slow
		}
		why = cmp.Or(j.passing.Load(), why) // of the last attempt that had its time
	}
	j.done(why)
	return true, slow
}

// isPassing reports whether the next attempt may come to more, with time left for it.
func isPassing(why *Unavailable) bool {
	slow := why.Reason == ReasonTimeout && !errors.Is(why, newconn.ErrNoAnswer)
	return slow || errors.Is(why, errNotAccepted) || errors.Is(why, errUnknown)
}

// movers move connections, those that a dial waits for and those in the background.
var movers = newMoverPool()

type moverPool struct {
	mu               sync.Mutex // guards what follows
	waiting, running int
	queues           map[netip.AddrPort][]*job // those that wait, by their peer; none is empty
	line             []netip.AddrPort          // the peers that have one: who has had a turn is the last again
	at               map[netip.AddrPort]int    // how many are running, by their peer
	slow             map[netip.AddrPort]bool   // the last of them has run out of time
}

func newMoverPool() *moverPool {
	return &moverPool{queues: make(map[netip.AddrPort][]*job), at: make(map[netip.AddrPort]int), slow: make(map[netip.AddrPort]bool)}
}

// add has a job run when it is its turn. It does not block.
func (m *moverPool) add(j *job) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !j.peer.IsValid() { // the first time
		j.peer = j.h.TCP().RemoteAddr().(*net.TCPAddr).AddrPort()
		j.left = j.plan.settings.attempt
	}
	if m.queues[j.peer] == nil {
		m.line = append(m.line, j.peer)
	}
	m.queues[j.peer] = append(m.queues[j.peer], j)
	m.waiting++
	m.startLocked()
}

// startLocked runs those whose turn it is. Each is bounded by its time.
func (m *moverPool) startLocked() {
	for m.running < mostMoving {
		silent := 0
		for peer := range m.at {
			if m.slow[peer] {
				silent++
			}
		}
		i := slices.IndexFunc(m.line, func(peer netip.AddrPort) bool {
			if m.slow[peer] {
				return m.at[peer] == 0 && silent < mostSilent
			}
			return m.at[peer] < mostToOne
		})
		if i < 0 {
			return
		}
		peer := m.line[i]
		m.line = slices.Delete(m.line, i, i+1)
		q := m.queues[peer]
		j := q[0]
		q[0] = nil // the queue's memory outlives it
		if q = q[1:]; len(q) > 0 {
			m.queues[peer] = q
			m.line = append(m.line, peer)
		} else {
			delete(m.queues, peer)
		}
		m.waiting--
		m.running++
		m.at[peer]++
		go func() {
			tried, slow := j.run(m)
			m.ran(peer, tried, slow)
		}()
	}
}

func (m *moverPool) ran(peer netip.AddrPort, tried, slow bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.running--
	if tried {
		delete(m.slow, peer)
	}
	if slow {
		if len(m.slow) >= mostSlow {
			clear(m.slow)
		}
		m.slow[peer] = true
	}
	if m.at[peer]--; m.at[peer] == 0 {
		delete(m.at, peer)
	}
	m.startLocked()
}
