package shm

import (
	"github.com/sanconn/san/provider/shm/internal/quota"
	"github.com/sanconn/san/provider/shm/internal/ring"
	"github.com/sanconn/san/session"
)

// The methods of session.Messages, which documents them.

func (e *endpoint) Reserve(least, most int) []byte {
	if !e.alive() {
		return nil
	}
	room, do := e.out.Reserve(least, most)
	e.afterSending(do)
	return room
}

// Starved implements session.Starver.
func (e *endpoint) Starved() bool { return e.out.Starved() }

// Spare implements session.Starver. It is as much as rings may take: a process that may have little
// memory for rings has little for other things, too. Connections to other users' processes leave half of
// it: these may never finish the way back, and hold it as long as they live.
func (e *endpoint) Spare() int64 {
	most := e.link.slots.memory.Most()
	if e.link.ringUser() != quota.Own {
		most /= 2
	}
	return most
}

func (e *endpoint) Commit(n int) { e.afterSending(e.out.Commit(n)) }

func (e *endpoint) ReserveControl(n int) []byte {
	if !e.alive() {
		return nil
	}
	room, do := e.out.ReserveControl(n)
	e.afterSending(do)
	return room
}

func (e *endpoint) CommitControl(n int) { e.afterSending(e.out.CommitControl(n)) }

// alive reports whether the connection has not ended.
func (e *endpoint) alive() bool {
	switch v := e.remote.v.Load(); {
	case v == e.turn|stateOpen, v == e.turn|stateWithdrawn|stateHeld:
		e.out.Meet()
	case v&turnMask == e.turn:
		e.overByPeer(v & stateMask)
	}
	return e.err.Load() == nil
}

// afterSending does what a call of the writer has left to its caller. It seldom has anything to do, so
// it is small enough to be inlined, like afterReceiving.
func (e *endpoint) afterSending(do ring.Action) {
	if do != 0 {
		e.act(do, session.RecvReady, &e.out)
	}
}

// afterReceiving does what a call of the reader has left to its caller.
func (e *endpoint) afterReceiving(do ring.Action) {
	if do != 0 {
		e.act(do, session.SendReady, &e.in)
	}
}

// act does what a Writer or a Reader has left to its caller. news is what it means for the peer.
func (e *endpoint) act(do ring.Action, news session.Events, end interface{ Err() error }) {
	if do&ring.Wake != 0 {
		e.link.door.ring(e.slot.number, news)
	}
	if do&ring.Grew != 0 {
		e.link.reclaim.schedule()
	}
	if do&ring.Broken != 0 {
		e.violation(end.Err())
	}
}

func (e *endpoint) Poll(ev *session.Event) bool {
	if !e.met {
		e.met = e.slot.accepted()
	}
	if !e.met || e.bad.Load() {
		return false
	}
	msg, do := e.in.Poll()
	e.afterReceiving(do)
	if msg == nil {
		state := e.remote.load(e.turn)
		if state == stateOpen {
			return false
		}
		// Poll again after reading the state, to find what the peer committed before it closed.
		msg, do = e.in.Poll()
		e.afterReceiving(do)
		if msg == nil {
			e.overByPeer(state)
			return false
		}
	}
	ev.Kind, ev.ID, ev.Err = session.Message, 0, nil
	ev.Msg = msg
	return true
}

func (e *endpoint) Drop()         { e.afterReceiving(e.in.Drop()) }
func (e *endpoint) Keep()         { e.afterReceiving(e.in.Keep()) }
func (e *endpoint) Front() []byte { return e.in.Front() }
func (e *endpoint) Release()      { e.afterReceiving(e.in.Release()) }
