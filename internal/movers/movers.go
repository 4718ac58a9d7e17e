// Package movers has the connections of a process move in turns, by the peers that they go to, so
// that those of a peer which does nothing hold up no others for long.
package movers

import (
	"cmp"
	"context"
	"errors"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sanconn/san/internal/hello"
	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/reason"
	"github.com/sanconn/san/session"
)

const (
	// MostMoving bounds how many connections move at a time. Those to one address and port, whose
	// process may be stopped, are no more than are left to others; behind an attempt that has run
	// out of time it is one, and all such together leave as many to others, or are fewSlow. The rest
	// wait for their turn, and are used meanwhile: a device that makes its queue pairs one by one has
	// no more than that to make at once. With half of it to one address, a burst of dials with Require
	// is over before its caller has made many more of them in the place of those that are late.
	MostMoving = 64
	fewSlow    = MostMoving / 8

	// enoughTime is how long an attempt must have had to say that a peer does nothing, if its dial
	// had less than all of an attempt's time left; at most as long as sanconn waits for that.
	enoughTime = 500 * time.Millisecond

	mostSlow = 1 << 12 // addresses that are remembered for that; then all are forgotten

	// acceptPause is how long a connection that was not accepted yet is left alone, at first;
	// mostPause bounds its doubling, so that a dial that waits notices the accept.
	acceptPause = 50 * time.Microsecond
	mostPause   = 20 * time.Millisecond
)

// Job is a connection that is to move.
type Job struct {
	Peer      netip.AddrPort
	Move      func(context.Context) *session.Unavailable // an attempt; nil: it moves
	Done      func(*session.Unavailable)                 // called once; nil: it moves. It does not block
	Ctx       context.Context
	Remaining time.Duration // of its time, which passes while it runs or pauses, not while it waits for its turn
	Waits     bool          // for its other end to be accepted; each one waits for a listener's condition

	pause   time.Duration                       // the last one
	passing atomic.Pointer[session.Unavailable] // see Passing
}

// Passing returns why it has not moved so far, where that may pass.
func (j *Job) Passing() *session.Unavailable { return j.passing.Load() }

// run is an attempt to move, if there is time left for one: tried. slow: it has run out of time,
// and had enough. The rest of a job's time may be none to speak of.
func (j *Job) run(p *Scheduler) (tried, slow bool) {
	began := time.Now()
	ctx, cancel := context.WithTimeout(j.Ctx, j.Remaining)
	defer cancel()
	if ctx.Err() != nil {
		j.Done(cmp.Or(j.passing.Load(), reason.Of(ctx.Err())))
		return false, false
	}
	why := j.Move(ctx)
	undecided := why != nil && errors.Is(why, hello.ErrUndecided)
	enough := enoughTime
	if j.pause == 0 { // else the rest of it is as short as may be
		enough = min(enough, j.Remaining)
	}
	late := why != nil && why.Reason == session.ReasonTimeout && !undecided
	slow = late && time.Since(began) >= enough
	tried = slow || !late || j.pause == 0
	if why != nil && (j.Waits && isPassing(why) || undecided) {
		if ctx.Err() == nil {
			j.passing.Store(why)
			j.pause = min(max(2*j.pause, acceptPause), mostPause)
			j.Remaining -= time.Since(began) + j.pause
			time.AfterFunc(j.pause, func() { p.Add(j) })
			return tried, slow
		}
		why = cmp.Or(j.passing.Load(), why) // of the last attempt that had its time
	}
	j.Done(why)
	return tried, slow
}

// isPassing reports whether the next attempt may come to more, with time left for it.
func isPassing(why *session.Unavailable) bool {
	slow := why.Reason == session.ReasonTimeout && !errors.Is(why, newconn.ErrNoAnswer)
	return slow || errors.Is(why, hello.ErrNotAccepted) || errors.Is(why, hello.ErrUnknown)
}

// Scheduler has jobs run. The zero value is ready for use.
type Scheduler struct {
	mu               sync.Mutex // guards what follows
	waiting, running int
	queues           map[netip.AddrPort][]*Job // those that wait, by their peer; none is empty
	line             []netip.AddrPort          // the peers that have one: who has had a turn is the last again
	at               map[netip.AddrPort]int    // how many are running, by their peer
	slow             map[netip.AddrPort]bool   // the last of them has run out of time
}

// Counts returns how many jobs run, and how many wait for their turn. It waits for mu a little
// while at most; ok: it has had it.
func (p *Scheduler) Counts() (running, waiting int, ok bool) {
	if !session.LockSoon(&p.mu) {
		return 0, 0, false
	}
	defer p.mu.Unlock()
	return p.running, p.waiting, true
}

// Add has a job run when it is its turn. It does not block.
func (p *Scheduler) Add(j *Job) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.queues == nil {
		p.queues, p.at, p.slow = make(map[netip.AddrPort][]*Job), make(map[netip.AddrPort]int), make(map[netip.AddrPort]bool)
	}
	if p.queues[j.Peer] == nil {
		p.line = append(p.line, j.Peer)
	}
	p.queues[j.Peer] = append(p.queues[j.Peer], j)
	p.waiting++
	p.startLocked()
}

// startLocked runs those whose turn it is. Each is bounded by its time.
func (p *Scheduler) startLocked() {
	for p.running < MostMoving {
		silent, free := 0, MostMoving-p.running
		for peer := range p.at {
			if p.slow[peer] {
				silent++
			}
		}
		i := slices.IndexFunc(p.line, func(peer netip.AddrPort) bool {
			if p.slow[peer] {
				return p.at[peer] == 0 && silent < max(free, fewSlow)
			}
			return p.at[peer] < free
		})
		if i < 0 {
			return
		}
		peer := p.line[i]
		p.line = slices.Delete(p.line, i, i+1)
		q := p.queues[peer]
		j := q[0]
		q[0] = nil // the queue's memory outlives it
		if q = q[1:]; len(q) > 0 {
			p.queues[peer] = q
			p.line = append(p.line, peer)
		} else {
			delete(p.queues, peer)
		}
		p.waiting--
		p.running++
		p.at[peer]++
		go func() {
			tried, slow := j.run(p)
			p.ran(peer, tried, slow)
		}()
	}
}

func (p *Scheduler) ran(peer netip.AddrPort, tried, slow bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.running--
	if tried {
		delete(p.slow, peer)
	}
	if slow {
		if len(p.slow) >= mostSlow {
			clear(p.slow)
		}
		p.slow[peer] = true
	}
	if p.at[peer]--; p.at[peer] == 0 {
		delete(p.at, peer)
	}
	p.startLocked()
}
