package session

import (
	"sync/atomic"

	"github.com/sanconn/san/internal/spin"
)

// side is a kind of operation of which one is in progress at a time: those that read, those that write,
// and WriteUrgent.
type side struct {
	op    opLock        // held for the whole operation
	state atomic.Uint32 // st bits: why the operation has to end
	wants atomic.Uint32 // Events to be woken for; 0: it does not sleep
	wake  chan struct{} // holds one token: look again
	spins spin.History  // guarded by op
	slept atomic.Bool   // the operation has slept, so it polls again only once bytes move

	ignores atomic.Uint32 // st bits that do not apply to the operation; changes with op held

	sleeper Sleeper     // nil: the endpoint is no Sleeper
	asleep  atomic.Bool // in Sleep

	since         atomic.Int64 // when the wait fell asleep, since processStart; 0: it is awake
	sleeps, polls atomic.Uint64
}

const (
	stInterrupted = 1 << iota // by InterruptRead, InterruptWrite
	stShut                    // wr only: by CloseWrite
	stClosed                  // the session was closed here
	stPeerClosed              // wr only: the peer no longer reads
	stTaken                   // set by the layer above
	stPeerReset               // … and has left bytes unread
)

// stopBits returns why the operation has to end. Its caller has op.
func (sd *side) stopBits() uint32 { return sd.state.Load() &^ sd.ignores.Load() }

// begin begins an operation, once earlier ones have ended; op.Unlock ends it.
func (sd *side) begin() {
	sd.op.Lock()
	sd.slept.Store(false)
}

// asTaker begins an operation of the layer that has taken the direction, which neither stTaken nor
// stInterrupted stops. It returns the function that ends the operation.
func (sd *side) asTaker() (end func()) {
	sd.begin()
	sd.ignores.Store(stTaken | stInterrupted)
	return func() {
		sd.ignores.Store(0)
		sd.op.Unlock()
	}
}

// blocked reports whether an operation is in progress that has slept.
func (sd *side) blocked() bool { return sd.op.held() && sd.slept.Load() }

// signal makes the operation look again, if there is one.
func (sd *side) signal() {
	if !sd.asleep.Load() {
		select {
		case sd.wake <- struct{}{}:
		default:
		}
	}
	if sd.asleep.Load() { // now, or since the check above
		sd.sleeper.Rouse(sd.wake)
	}
}

// sleep waits for a signal.
func (sd *side) sleep() {
	if sd.sleeper == nil {
		<-sd.wake
		return
	}
	sd.asleep.Store(true)
	sd.sleeper.Sleep(sd.wake)
	sd.asleep.Store(false)
}

// signalSleeper is signal only for an operation that sleeps: one that polls looks anyway.
func (sd *side) signalSleeper() {
	if sd.wants.Load() != 0 {
		sd.signal()
	}
}

func (sd *side) set(bits uint32) {
	sd.state.Or(bits)
	sd.signal()
}

func (sd *side) interrupt(on bool) {
	if on {
		sd.set(stInterrupted)
	} else {
		sd.state.And(^uint32(stInterrupted))
	}
}

// opLock is a first-come, first-served mutex for long operations. Waiters sleep on a channel, because a
// goroutine that is blocked on a sync.Mutex keeps testing/synctest's clock from advancing, and the
// holder may wait for that clock.
type opLock struct {
	users atomic.Int32  // the holder and those that wait
	next  chan struct{} // hands the lock to the next one
}

func (l *opLock) Lock() {
	if l.users.Add(1) > 1 {
		<-l.next
	}
}

func (l *opLock) Unlock() {
	if l.users.Add(-1) > 0 {
		l.next <- struct{}{}
	}
}

// tryLock locks l if it is free.
func (l *opLock) tryLock() bool { return l.users.CompareAndSwap(0, 1) }

// held reports whether an operation is in progress.
func (l *opLock) held() bool { return l.users.Load() > 0 }
