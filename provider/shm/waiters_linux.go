package shm

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/sanconn/san/session"
)

// waiters are the goroutines that sleep for want of what a link's peer will ring for, as leader and
// followers: one of them waits at the doorbell, and delivers what it finds there. The runtime's
// poller wakes that one directly, as it does a read of a TCP socket, where another goroutine would
// have to wake it, for which the runtime wakes a thread besides. Where several sleep, or none does,
// the link's dispatcher, a goroutine of its own, waits there.
//
// So somebody is there whenever anybody sleeps. Behind a sleeper that was the only one, nobody is
// until it sleeps again. The session's idle poller bounds that time (Rest), as whoever has slept is
// on its list.
type waiters struct {
	door    *doorbell
	deliver func(slot int, ev session.Events)
	ready   func(fd uintptr) bool // made once: in the loop it would be allocated for each wait

	dispatch chan struct{} // has the dispatcher wait at the doorbell; holds one
	stopped  atomic.Bool   // before a deadline ends the wait that is under way

	mu       sync.Mutex             // guards what follows; nothing that blocks under it
	sleepers map[chan struct{}]bool // by their channels: has one a token, and is about to go
	unwoken  int                    // how many of them have none
	leader   chan struct{}          // of the sleeper that waits in the poller; nil: none does
	led      bool                   // a sleeper or the dispatcher waits at the doorbell, or is about to
	roused   bool                   // the dispatcher has woken a sleeper in this turn
}

func (w *waiters) init(d *doorbell, deliver func(slot int, ev session.Events)) {
	w.door, w.deliver = d, deliver
	w.dispatch = make(chan struct{}, 1)
	w.sleepers = make(map[chan struct{}]bool)
	w.ready = func(fd uintptr) bool {
		// Each ring is an edge for epoll, unless the queue of a socket is full; so that is
		// read before asleep is set. News are looked for after that, and asleep is set
		// before every look, because there is one ring for each time.
		if d.drains {
			drain(int(fd))
		}
		d.own.asleep.Set(0)
		return d.seen.pending(d.peers)
	}
	w.led = true // by the dispatcher, which begins
}

// run is the dispatcher, until stop.
func (w *waiters) run() {
	for !w.stopped.Load() {
		if w.door.wait.Read(w.ready) != nil { // stop, or a Rouse that came late
			w.door.at.SetReadDeadline(time.Time{})
			continue
		}
		w.mu.Lock()
		w.roused = false
		w.mu.Unlock()
		w.door.seen.collect(w.door.peers, w.deliver)
		if !w.dispatches() {
			<-w.dispatch
		}
	}
}

// dispatches reports whether the dispatcher waits on. If it has woken the only sleeper, the first
// to sleep again leads.
func (w *waiters) dispatches() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.led = !w.roused || w.unwoken > 0
	return w.led
}

// Sleep implements session.Sleeper: it returns when there is a token in wake, which it takes.
func (w *waiters) Sleep(wake chan struct{}) {
	w.mu.Lock()
	w.sleepers[wake] = false
	w.unwoken++
	leads := !w.led
	if leads {
		w.led, w.leader = true, wake
	}
	w.mu.Unlock()
	if leads {
		w.lead(wake)
	} else {
		<-wake
	}
	w.mu.Lock()
	if !w.sleepers[wake] {
		w.unwoken--
	}
	delete(w.sleepers, wake)
	if leads {
		w.led, w.leader = false, nil
	}
	dispatch := !w.led && len(w.sleepers) > 0
	w.led = w.led || dispatch
	w.mu.Unlock()
	if dispatch {
		w.wakeDispatcher()
	}
}

// lead waits at the doorbell until there is a token in wake, which it takes.
func (w *waiters) lead(wake chan struct{}) {
	for {
		select {
		case <-wake:
			return
		default:
		}
		if w.door.wait.Read(w.ready) != nil { // Rouse
			w.door.at.SetReadDeadline(time.Time{})
			continue
		}
		w.setLeader(nil) // it looks there anyway
		w.door.seen.collect(w.door.peers, w.deliver)
		w.setLeader(wake)
	}
}

func (w *waiters) setLeader(wake chan struct{}) {
	w.mu.Lock()
	w.leader = wake
	w.mu.Unlock()
}

// Rouse implements session.Sleeper: it puts a token into the channel of a sleeper, if there is none
// in it, and has the sleeper look there if it leads. Under the lock, so that a token is known to be
// for the sleep that is under way.
func (w *waiters) Rouse(wake chan struct{}) {
	w.mu.Lock()
	select {
	case wake <- struct{}{}:
	default:
	}
	if woken, sleeps := w.sleepers[wake]; sleeps && !woken {
		w.sleepers[wake], w.roused = true, true
		w.unwoken--
	}
	leads := w.leader == wake
	w.mu.Unlock()
	if leads {
		w.door.at.SetReadDeadline(longAgo)
	}
}

// longAgo ends a read at once.
var longAgo = time.Unix(1, 0)

// Rest implements session.Sleeper: it has the dispatcher wait at the doorbell if nobody does.
func (w *waiters) Rest() {
	w.mu.Lock()
	dispatch := !w.led
	w.led = true
	w.roused = false // the dispatcher stays, if it was about to leave
	w.mu.Unlock()
	if dispatch {
		w.wakeDispatcher()
	}
}

// stop ends the dispatcher. Nobody sleeps any more.
func (w *waiters) stop() {
	w.stopped.Store(true)
	w.door.at.SetReadDeadline(longAgo)
	w.wakeDispatcher()
}

func (w *waiters) wakeDispatcher() {
	select {
	case w.dispatch <- struct{}{}:
	default: // it has been woken
	}
}
