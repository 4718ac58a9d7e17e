package session

import (
	"fmt"
	"syscall"
	"time"
)

// engine takes what comes from the endpoint, and does what is due afterwards: for a waiting operation,
// for the idle poller, and when the endpoint wakes the session.
type engine struct{ *core }

// lockRx begins a use of the receiver.
func (e *engine) lockRx() {
	e.rxMu.Lock()
	e.markOverLocked()
}

// markOverLocked marks the receiver if the connection is over.
func (e *engine) markOverLocked() {
	if e.failure.Load() != nil {
		e.rx.stage.reach(over)
	}
}

// tryLockRx is lockRx unless the receiver is in use.
func (e *engine) tryLockRx() bool {
	if !e.rxMu.TryLock() {
		return false
	}
	e.markOverLocked()
	return true
}

// unlockRx ends a use of the receiver, and does what is due afterwards.
func (e *engine) unlockRx() {
	e.settleLocked()
	e.rxMu.Unlock()
}

// settleLocked does what is due after a use of the receiver, and sends what that requires.
func (e *engine) settleLocked() {
	do := &e.rx.do
	if do.fault != nil {
		e.fail(do.fault)
	}
	if do.wake {
		do.wake = false
		e.rd.signalSleeper()
	}
	if do.revoke.buf != nil {
		e.revoke(do.revoke)
		do.revoke = exposed{}
	}
	if len(do.control) > 0 {
		e.txMu.Lock()
		for _, c := range do.control {
			e.tx.queueControl(c)
		}
		e.unlockTx()
		do.control = do.control[:0]
	}
	if e.txWaits.Load() || e.credits.Due() {
		e.sendPending()
	}
}

// withSender calls use with the sender.
func (e *engine) withSender(use func(*sender)) {
	e.txMu.Lock()
	use(&e.tx)
	e.unlockTx()
}

// sendPending sends what waits. rxMu may be held.
func (e *engine) sendPending() { e.withSender((*sender).flush) }

// unlockTx ends a use of the sender, and does what is due afterwards.
func (e *engine) unlockTx() {
	tx := &e.tx
	if waits := tx.pending(); waits != e.txWaits.Load() {
		e.txWaits.Store(waits)
	}
	do := tx.do
	tx.do.wake = false
	e.txMu.Unlock()
	if do.fault != nil {
		e.fail(do.fault)
	}
	if do.wake {
		e.wakeWriters()
	}
}

// fail records why the connection is over, and wakes all operations. What was not taken from the
// endpoint is lost, unless the peer's stream has ended already. Any lock may be held.
func (e *engine) fail(err error) {
	if e.failure.CompareAndSwap(nil, &err) {
		e.signalAll()
		e.notifyEnd()
	}
}

// kill ends the connection at once: the endpoint is aborted. No lock may be held.
func (e *engine) kill(err error) {
	e.fail(err)
	e.detach(e.ep.Abort)
}

// killAfter is kill after d, unless stop is called before.
func (e *engine) killAfter(d time.Duration, why string) (stop func() bool) {
	return time.AfterFunc(d, func() { e.kill(fmt.Errorf("session: %s: %w", why, syscall.ETIMEDOUT)) }).Stop
}
