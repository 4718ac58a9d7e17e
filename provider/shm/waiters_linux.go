package shm

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/sanconn/san/session"
)

// waiters are the goroutines that sleep until the link's peer rings, as one leader with followers. The
// leader waits at the doorbell, and delivers the news that it finds. The runtime's poller wakes the
// leader directly, as it wakes a read of a TCP socket. If another goroutine had to wake it, the runtime
// would wake a thread besides. If several goroutines sleep, or none, the link's dispatcher, a goroutine
// of its own, waits at the doorbell.
//
// So somebody waits there whenever anybody sleeps. After the only sleeper was woken, nobody waits until
// it sleeps again. The session's idle poller bounds that time (Rest), because it has each session that
// has slept in its list.
type waiters struct {
	door    *doorbell
	deliver func(slot int, ev session.Events)
	ready   func(fd uintptr) bool // made once; in the loop it would be allocated for each wait

	dispatch chan struct{} // makes the dispatcher wait at the doorbell; holds one
	stopped  atomic.Bool   // set before a deadline ends the present wait

	mu       sync.Mutex             // guards the fields below; nothing blocks with it held
	sleepers map[chan struct{}]bool // by their channels; true: it has a token, and is about to return
	unwoken  int                    // how many sleepers have no token
	leader   chan struct{}          // the channel of the sleeper that waits in the poller; nil: none does
	led      bool                   // a sleeper or the dispatcher waits at the doorbell, or is about to
	roused   bool                   // the dispatcher has woken a sleeper in this turn
}

func (w *waiters) init(d *doorbell, deliver func(slot int, ev session.Events)) {
	w.door, w.deliver = d, deliver
	w.dispatch = make(chan struct{}, 1)
	w.sleepers = make(map[chan struct{}]bool)
	w.ready = func(fd uintptr) bool {
		// Each ring is an edge for epoll, except while a socket's queue is full. So the socket is read
		// before asleep is set. asleep is set before each look, because each setting of it causes one
		// ring at most, and news are looked for afterwards.
		if d.drains {
			drain(int(fd))
		}
		d.own.asleep.Set(0)
		return d.seen.pending(d.peers)
	}
	w.led = true // the dispatcher waits first
}

// run is the dispatcher. It returns after stop.
func (w *waiters) run() {
	for !w.stopped.Load() {
		if w.door.wait.Read(w.ready) != nil { // stop, or a late Rouse
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

// dispatches reports whether the dispatcher has to wait on. If it has woken the only sleeper, it need
// not: the first goroutine to sleep again leads.
func (w *waiters) dispatches() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.led = !w.roused || w.unwoken > 0
	return w.led
}

// Sleep implements session.Sleeper: it takes a token from wake, and returns when it has it.
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

// lead waits at the doorbell until it has taken a token from wake.
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
		w.setLeader(nil) // it looks for a token below anyway
		w.door.seen.collect(w.door.peers, w.deliver)
		w.setLeader(wake)
	}
}

func (w *waiters) setLeader(wake chan struct{}) {
	w.mu.Lock()
	w.leader = wake
	w.mu.Unlock()
}

// Rouse implements session.Sleeper: it puts a token into a sleeper's channel, if that is empty, and
// ends the sleeper's wait at the doorbell if the sleeper leads. The token is put in with mu held, so
// that it belongs to the sleep that is in progress.
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

// longAgo is a deadline that ends a read at once.
var longAgo = time.Unix(1, 0)

// Rest implements session.Sleeper: it makes the dispatcher wait at the doorbell if nobody does.
func (w *waiters) Rest() {
	w.mu.Lock()
	dispatch := !w.led
	w.led = true
	w.roused = false // keeps a dispatcher that is about to leave
	w.mu.Unlock()
	if dispatch {
		w.wakeDispatcher()
	}
}

// stop ends the dispatcher. There must be no sleepers.
func (w *waiters) stop() {
	w.stopped.Store(true)
	w.door.at.SetReadDeadline(longAgo)
	w.wakeDispatcher()
}

func (w *waiters) wakeDispatcher() {
	select {
	case w.dispatch <- struct{}{}:
	default: // it was woken already
	}
}
