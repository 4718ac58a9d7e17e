package shm

import (
	"errors"
	"os"
	"sync/atomic"
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
//
// There is no lock, for which the sleepers that a turn of the keeper has woken would queue. Who
// leaves the doorbell sets attended to false and then looks for others; who comes counts
// itself and then looks at attended: so one of them sees the other.
type attendance struct {
	door    *doorbell
	deliver func(slot int, ev session.Events)
	ready   func(fd uintptr) bool // made once: in the loop it would be allocated for each wait

	keep chan struct{} // has the keeper attend; holds one

	attended atomic.Bool                 // by a sleeper or the keeper, or about to be
	leader   atomic.Pointer[session.Nap] // of the sleeper that waits in the poller; nil: none does
	unwoken  atomic.Int32                // sleepers that nobody has roused yet
	watchers atomic.Int32                // who wait elsewhere, and want somebody to attend
	roused   atomic.Bool                 // a sleeper has been roused in this turn of the keeper
}

// The marks of naps.
const (
	awake uint32 = iota
	asleep
	roused // not asleep any more for what unwoken counts: a token is there, or is about to be
)

func (a *attendance) init(d *doorbell, deliver func(slot int, ev session.Events)) {
	a.door, a.deliver = d, deliver
	a.keep = make(chan struct{}, 1)
	var drain [64]byte
	a.ready = func(fd uintptr) bool {
		// Each ring is an edge for epoll, unless the queue of a socket is full; so that is
		// read before asleep is set. The bits are looked at after that, and asleep is set
		// before every look, because each ring clears it.
		if d.drains {
			unix.Read(int(fd), drain[:])
		}
		d.in.asleep.Store(1)
		return d.in.pending()
	}
	a.attended.Store(true) // by the keeper, which begins
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
		a.roused.Store(false)
		a.door.in.take(a.deliver)
		if a.handedOn() {
			<-a.keep
		}
	}
}

// handedOn reports whether the keeper need not attend any more: it has woken a sleeper, and
// there are no others. The first to sleep again will attend.
func (a *attendance) handedOn() bool {
	if !a.roused.Load() || a.wanted() {
		return false
	}
	a.attended.Store(false)
	return !a.wanted() || !a.attend()
}

// wanted reports whether somebody depends on who waits at the doorbell.
func (a *attendance) wanted() bool { return a.unwoken.Load() > 0 || a.watchers.Load() > 0 }

// attend takes the place at the doorbell, if it is free.
func (a *attendance) attend() bool {
	return !a.attended.Load() && a.attended.CompareAndSwap(false, true)
}

// fallAsleep begins a sleep, and reports whether it is to wait at the doorbell.
func (a *attendance) fallAsleep(n *session.Nap) (leads bool) {
	a.unwoken.Add(1)
	n.Mark.Store(asleep)
	return a.attend()
}

// sleep returns when there is a token in the nap, which it takes.
func (a *attendance) sleep(n *session.Nap) {
	leads := a.fallAsleep(n)
	if leads {
		a.lead(n)
	} else {
		<-n.Token
	}
	if n.Mark.Swap(awake) == asleep { // by a token from before
		a.unwoken.Add(-1)
	}
	if leads {
		a.attended.Store(false)
		if a.wanted() {
			a.rest()
		}
	}
}

// lead waits at the doorbell until there is a token in the nap, which it takes.
func (a *attendance) lead(n *session.Nap) {
	defer a.leader.Store(nil)
	for {
		a.leader.Store(n)
		select {
		case <-n.Token:
			return
		default:
		}
		switch err := a.door.wait.Read(a.ready); {
		case errors.Is(err, os.ErrDeadlineExceeded): // rouse
			a.door.at.SetReadDeadline(time.Time{})
			continue
		case err != nil: // stop: whoever uses the link has been woken
			<-n.Token
			return
		}
		a.leader.Store(nil) // it looks there anyway
		a.door.in.take(a.deliver)
	}
}

// rouse puts a token into the nap, and has its sleeper look there if that leads. The token
// comes behind the mark: it may end this sleep or the next one, but a sleep that is marked gets
// one.
func (a *attendance) rouse(n *session.Nap) {
	if n.Mark.CompareAndSwap(asleep, roused) {
		a.roused.Store(true)
		a.unwoken.Add(-1)
	}
	n.Put()
	if a.leader.Load() == n {
		a.door.at.SetReadDeadline(longAgo)
	}
}

// longAgo ends a read at once.
var longAgo = time.Unix(1, 0)

// rest has the keeper attend if nobody does.
func (a *attendance) rest() {
	if a.attend() {
		a.wakeKeeper()
	}
}

// watch has somebody attend until unwatch, for a wait that is no sleep.
func (a *attendance) watch() {
	a.watchers.Add(1)
	a.rest()
}

func (a *attendance) unwatch() { a.watchers.Add(-1) }

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
