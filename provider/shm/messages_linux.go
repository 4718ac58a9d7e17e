package shm

import (
	"github.com/sanconn/san/provider/shm/internal/ring"
	"github.com/sanconn/san/session"
)

// Reserve implements session.Endpoint.
func (e *endpoint) Reserve(least, most int) []byte {
	if !e.open() {
		return nil
	}
	room, do := e.out.Reserve(least, most)
	if do != 0 {
		e.afterSending(do)
	}
	return room
}

// Commit implements session.Endpoint.
func (e *endpoint) Commit(n int) {
	if do := e.out.Commit(n); do != 0 {
		e.afterSending(do)
	}
}

// ReserveControl implements session.Endpoint.
func (e *endpoint) ReserveControl(n int) []byte {
	if !e.open() {
		return nil
	}
	room, do := e.out.ReserveControl(n)
	if do != 0 {
		e.afterSending(do)
	}
	return room
}

// CommitControl implements session.Endpoint.
func (e *endpoint) CommitControl(n int) {
	if do := e.out.CommitControl(n); do != 0 {
		e.afterSending(do)
	}
}

// open reports whether the connection lives.
func (e *endpoint) open() bool {
	switch v := e.remote.v.Load(); {
	case v == e.turn|stateOpen:
		e.out.Meet()
	case v&turnMask == e.turn:
		e.peerState(v & stateMask)
	}
	return e.err.Load() == nil
}

func (e *endpoint) afterSending(do ring.Action) {
	if do&ring.Wake != 0 {
		e.link.door.ring(e.slot.number, session.RecvReady)
	}
	if do&ring.Grew != 0 {
		e.link.reclaim.wake()
	}
	if do&ring.Broken != 0 {
		e.violation(e.out.Err())
	}
}

// Poll implements session.Endpoint.
func (e *endpoint) Poll(ev *session.Event) bool {
	if e.bad.Load() || !e.met && !e.meet() {
		return false
	}
	msg, do := e.in.Poll()
	if do != 0 {
		e.afterReceiving(do)
	}
	if msg == nil {
		state := e.remote.load(e.turn)
		if state == stateOpen {
			return false
		}
		// Once more after the state, to find what the peer committed before it closed.
		if msg, do = e.in.Poll(); do != 0 {
			e.afterReceiving(do)
		}
		if msg == nil {
			e.peerState(state)
			return false
		}
	}
	ev.Kind, ev.ID, ev.Err = session.Message, 0, nil
	ev.Msg = msg
	return true
}

// meet reports whether the peer has begun the connection.
func (e *endpoint) meet() bool {
	e.met = e.slot.taken()
	return e.met
}

// Drop implements session.Endpoint.
func (e *endpoint) Drop() {
	if do := e.in.Drop(); do != 0 {
		e.afterReceiving(do)
	}
}

// Keep implements session.Endpoint.
func (e *endpoint) Keep() {
	if do := e.in.Keep(); do != 0 {
		e.afterReceiving(do)
	}
}

// Front implements session.Endpoint.
func (e *endpoint) Front() []byte { return e.in.Front() }

// Release implements session.Endpoint.
func (e *endpoint) Release() {
	if do := e.in.Release(); do != 0 {
		e.afterReceiving(do)
	}
}

func (e *endpoint) afterReceiving(do ring.Action) {
	if do&ring.Wake != 0 {
		e.link.door.ring(e.slot.number, session.SendReady)
	}
	if do&ring.Broken != 0 {
		e.violation(e.in.Err())
	}
}

// shrink gives back the pages of an idle ring. The reclaimer calls it. It reports whether it
// has to run again.
func (e *endpoint) shrink() (again bool) {
	again, met := e.out.Shrink(func(pages uint64) bool { return punchHole(e.slot.own.ring, pages) })
	if met {
		e.wake(session.SendReady)
	}
	return again
}
