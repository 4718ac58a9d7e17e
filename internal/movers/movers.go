// Package movers schedules the moves of a process's connections. Each peer has a queue, and the queues
// take turns, so that a peer that does not respond holds up the connections to other peers only
// briefly.
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
	// MostMoving bounds how many connections move at a time, and so how many queue pairs a device has
	// to make at once. The other connections wait in their queues, and are used meanwhile.
	//
	// A peer, which is one address and port, may have as many attempts under way as it leaves to other
	// peers, because its process may be stopped. A slow peer, whose last attempt ran out of time, may
	// have one. All slow peers together may have as many as they leave to others, or fewSlow if that is
	// more. With half of MostMoving for one peer, a burst of dials with Require is over before its
	// caller has dialed many more in place of those that were late.
	MostMoving = 64
	fewSlow    = MostMoving / 8

	// enoughTime is how long an attempt that ran out of time must have taken for its peer to count as
	// slow. A first attempt may have taken less, if Job.Remaining was less. Sanconn waits as long for a
	// peer that does nothing, or longer.
	enoughTime = 500 * time.Millisecond

	mostSlow = 1 << 12 // slow peers that are remembered; at the bound all are forgotten

	// acceptPause is the first pause after an attempt whose connection was not accepted yet. Pauses
	// double up to mostPause, which is short enough for a waiting dial to notice the accept.
	acceptPause = 50 * time.Microsecond
	mostPause   = 20 * time.Millisecond
)

// Job is a connection that is to move.
type Job struct {
	Peer      netip.AddrPort
	Move      func(context.Context) *session.Unavailable // makes an attempt; nil: the connection moves
	Done      func(*session.Unavailable)                 // called once, with nil if the connection moves; does not block
	Ctx       context.Context
	Remaining time.Duration // of the job's time, which passes during attempts and pauses, but not in the queue
	Waits     bool          // for the other end to be accepted; for a listener's condition every job waits

	pause   time.Duration                       // the last pause
	passing atomic.Pointer[session.Unavailable] // see Passing
}

// Passing returns the reason of the last attempt that failed for a cause that may pass, or nil.
func (j *Job) Passing() *session.Unavailable { return j.passing.Load() }

// run makes an attempt to move. tried: it had time enough to show something about the peer. slow: it
// ran out of time, and had enough of it. The time that is left of a job may be too short for that.
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
	if j.pause == 0 { // else this attempt has only what is left of the job's time
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
		why = cmp.Or(j.passing.Load(), why) // the reason of the last attempt that had enough time
	}
	j.Done(why)
	return tried, slow
}

// isPassing reports whether another attempt may succeed for which time is left.
func isPassing(why *session.Unavailable) bool {
	slow := why.Reason == session.ReasonTimeout && !errors.Is(why, newconn.ErrNoAnswer)
	return slow || errors.Is(why, hello.ErrNotAccepted) || errors.Is(why, hello.ErrUnknown)
}

// Scheduler runs jobs. The zero value is ready for use.
type Scheduler struct {
	mu               sync.Mutex // guards the fields below
	waiting, running int
	queues           map[netip.AddrPort][]*Job // waiting jobs by peer; no queue is empty
	line             []netip.AddrPort          // the peers that have a queue, in the order of their turns; after its turn a peer goes to the end
	at               map[netip.AddrPort]int    // running jobs by peer
	slow             map[netip.AddrPort]bool   // peers whose last attempt ran out of time
}

// Counts returns how many jobs run and how many wait for their turn. ok is false if mu could not be
// locked soon.
func (p *Scheduler) Counts() (running, waiting int, ok bool) {
	if !session.LockSoon(&p.mu) {
		return 0, 0, false
	}
	defer p.mu.Unlock()
	return p.running, p.waiting, true
}

// Add queues a job, which runs in its turn. It does not block.
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

// startLocked starts the jobs whose turn it is, in goroutines that end when their time is up.
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
		q[0] = nil // the array behind the queue lives on
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
