package session

import (
	"time"

	"github.com/sanconn/san/internal/spin"
)

// processStart is what side.since counts from.
var processStart = time.Now()

// await is the only place where a session waits. It calls test after each poll, and each time that one
// of the events may have happened for which it waits: first want, and then the result of the last test.
// await returns when test returns 0. test makes what progress it can. sure: the endpoint is armed, and
// await sleeps if this test returns events. No lock may be held except sd's op.
//
// A wait polls for a while (package spin), then arms the endpoint, looks once more, and sleeps on a
// channel, which needs no thread. When bytes have moved, it polls for the whole time again, as the next
// bytes take about as long. Whatever may end a wait, an event, a deadline or Close, puts a token into
// that channel.
func (e *engine) await(sd *side, want Events, test func(sure bool) Events) {
	if want == 0 {
		return
	}
	var w spin.Wait
	moved := e.advances.Load()
	polls := !sd.slept.Load() && w.Begin(&sd.spins, e.spin)
	armed := Events(0)
	for want != 0 {
		switch {
		case polls && w.Turn():
		case want&^armed != 0:
			polls, armed = false, want
			sd.wants.Store(uint32(want))
			e.ep.Arm(want)
		default:
			polls, armed = false, 0
			sd.sleeps.Add(1)
			if sd.since.Load() == 0 {
				sd.since.Store(int64(time.Since(processStart)))
			}
			sd.sleep()
			sd.slept.Store(true)
		}
		want = test(armed != 0)
		if now := e.advances.Load(); now != moved && want != 0 {
			moved = now
			if polls {
				w.Again()
			} else if armed == 0 {
				polls = w.Begin(&sd.spins, e.spin)
			}
		}
	}
	if polls {
		w.End()
		sd.polls.Add(1)
	}
	if armed != 0 {
		e.disarm(sd)
	}
	if sd.wants.Load() != 0 {
		sd.wants.Store(0)
		sd.since.Store(0)
		if e.notes.begun.Load() { // not in Negotiate
			e.enlist()
		}
	}
}

// attempt is await after a first test.
func (e *engine) attempt(sd *side, test func(sure bool) Events) { e.await(sd, test(false), test) }

// disarm disarms the endpoint for this side, except for events that another side waits for.
func (c *core) disarm(sd *side) {
	ev := Events(sd.wants.Load()) &^ c.othersWant(sd)
	if ev == 0 {
		return
	}
	c.ep.Disarm(ev)
	if ev &= c.othersWant(sd); ev != 0 { // another side has armed in between
		c.ep.Arm(ev)
		c.signalAll()
	}
}

// othersWant returns the events that the other sides sleep for.
func (c *core) othersWant(sd *side) (ev Events) {
	for _, other := range c.sides() {
		if other != sd {
			ev |= Events(other.wants.Load())
		}
	}
	return ev
}
