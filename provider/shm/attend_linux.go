package shm

import (
	"errors"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/session"
)

// attendance is who waits at a link's doorbell: one goroutine at a time. That is, wherever
// possible, one that sleeps for want of what the peer will ring for. The runtime's poller then
// wakes it directly, as it does a read of a TCP socket, where another goroutine would have to
// hand the news on, for which the runtime wakes a thread besides. Where several sleep, or nobody
// does, the link's keeper waits.
//
// For moments nobody may: behind a sleeper that was the only one, until it sleeps again.
// The janitor bounds these (rest), as whoever has slept is on its list.
type attendance struct {
	door    *doorbell
	deliver func(slot int, ev session.Events)
	ready   func(fd uintptr) bool // made once: in the loop it would be allocated for each wait

	keep chan struct{} // has the keeper attend; holds one

	mu       sync.Mutex             // guards what follows; nothing that blocks under it
	asleep   map[chan struct{}]bool // those in sleep, by their channels: has one a token, and is about to go
	unwoken  int                    // how many of them have none
	leader   chan struct{}          // of the sleeper that waits in the poller; nil: none does
	attended bool                   // by a sleeper or the keeper, or about to be
	roused   bool                   // the keeper has woken a sleeper in this turn
}

func (a *attendance) init(d *doorbell, deliver func(slot int, ev session.Events)) {
	a.door, a.deliver = d, deliver
	a.keep = make(chan struct{}, 1)
	a.asleep = make(map[chan struct{}]bool)
	var drain [64]byte
	a.ready = func(fd uintptr) bool {
		// Each ring is an edge for epoll, unless the queue of a socket is full; so that is
		// read before asleep is set. News are looked for after that, and asleep is set
		// before every look, because there is one ring for each time.
		if d.drains {
			unix.Read(int(fd), drain[:])
		}
		d.own.asleep.Set(0)
		return d.heard.pending(d.peers)
	}
	a.attended = true // by the keeper, which begins
}

// serve is the keeper, until stop.
func (a *attendance) serve() {
	for {
		switch err := a.door.wait.Read(a.ready); {
		case errors.Is(err, os.ErrDeadlineExceeded): // a rouse that came late
			a.door.at.SetReadDeadline(time.Time{})
			continue
		case err != nil:
			return
		}
		a.mu.Lock()
		a.roused = false
		a.mu.Unlock()
		a.door.heard.take(a.door.peers, a.deliver)
		if a.handedOn() {
			<-a.keep
		}
	}
}

// handedOn reports whether the keeper need not attend any more: it has woken a sleeper, and
// there are no others. The first to sleep again will attend.
func (a *attendance) handedOn() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.roused || a.unwoken > 0 {
		return false
	}
	a.attended = false
	return true
}

// sleep returns when there is a token in wake, which it takes.
func (a *attendance) sleep(wake chan struct{}) {
	a.mu.Lock()
	a.asleep[wake] = false
	a.unwoken++
	leads := !a.attended
	if leads {
		a.attended, a.leader = true, wake
	}
	a.mu.Unlock()
	if leads {
		a.lead(wake)
	} else {
		<-wake
	}
	a.mu.Lock()
	if !a.asleep[wake] {
		a.unwoken--
	}
	delete(a.asleep, wake)
	if leads {
		a.attended, a.leader = false, nil
	}
	keep := !a.attended && len(a.asleep) > 0
	a.attended = a.attended || keep
	a.mu.Unlock()
	if keep {
		a.wakeKeeper()
	}
}

// lead waits at the doorbell until there is a token in wake, which it takes.
func (a *attendance) lead(wake chan struct{}) {
	for {
		select {
		case <-wake:
			return
		default:
		}
		switch err := a.door.wait.Read(a.ready); {
		case errors.Is(err, os.ErrDeadlineExceeded): // rouse
			a.door.at.SetReadDeadline(time.Time{})
			continue
		case err != nil: // stop: whoever uses the link has been woken
			<-wake
			return
		}
		a.setLeader(nil) // it looks there anyway
		a.door.heard.take(a.door.peers, a.deliver)
		a.setLeader(wake)
	}
}

func (a *attendance) setLeader(wake chan struct{}) {
	a.mu.Lock()
	a.leader = wake
	a.mu.Unlock()
}

// rouse puts a token into the channel of a sleeper, if there is none in it, and has the
// sleeper look there if it leads. Under the lock, so that a token is known to be for the
// sleep that is under way.
func (a *attendance) rouse(wake chan struct{}) {
	a.mu.Lock()
	select {
	case wake <- struct{}{}:
	default:
	}
	if woken, sleeps := a.asleep[wake]; sleeps && !woken {
		a.asleep[wake], a.roused = true, true
		a.unwoken--
	}
	leads := a.leader == wake
	a.mu.Unlock()
	if leads {
		a.door.at.SetReadDeadline(longAgo)
	}
}

// longAgo ends a read at once.
var longAgo = time.Unix(1, 0)

// rest has the keeper attend if nobody does.
func (a *attendance) rest() {
	a.mu.Lock()
	keep := !a.attended
	a.attended = true
	a.roused = false // the keeper stays, if it was about to leave
	a.mu.Unlock()
	if keep {
		a.wakeKeeper()
	}
}

// stop ends the keeper.
func (a *attendance) stop() {
	a.door.stop()
	a.wakeKeeper() // it finds the doorbell closed
}

func (a *attendance) wakeKeeper() {
	select {
	case a.keep <- struct{}{}:
	default: // it has been woken
	}
}
