package session

import (
	"errors"
	"fmt"
	"io"
	"syscall"

	"github.com/sanconn/san/internal/spin"
	"github.com/sanconn/san/session/internal/wire"
)

const (
	// trickleBelow is the average size in bytes of messages in a stream of small messages.
	trickleBelow = 1 << 10
	// trickleFor is how many Reads after one of several small messages pause before they look
	// (spin.Drain): a reader as fast as the writer would find each message by itself.
	trickleFor = 8
)

// Read reads up to len(p) bytes. It blocks until there is at least one, the
// end of the stream (io.EOF), or an error: ErrClosed, ErrInterrupted,
// syscall.ECONNRESET if the peer vanished or reset the connection (after
// everything that had arrived), ETIMEDOUT if it stopped answering.
func (r *reading) Read(p []byte) (int, error) {
	r.rd.begin()
	n, err := r.readHeld(p, nil)
	r.enlistPending()
	r.rd.op.Unlock()
	return n, err
}

// readHeld is Read for the holder of rd.op. If done is not nil, it is interrupted when done returns
// true.
func (r *reading) readHeld(p []byte, done func() bool) (n int, err error) {
	if st := r.rd.stopBits(); st != 0 {
		return 0, stopError(st)
	}
	r.enlist()
	if r.trickle > 0 && r.spin > 0 {
		spin.Drain()
	}
	if n, err = r.receive(p); n > 0 || err != nil || len(p) == 0 {
		return n, err
	}
	return r.readWaiting(p, done)
}

func (r *reading) readWaiting(p []byte, done func() bool) (n int, err error) {
	r.rx.fetch.waitingLen.Store(int64(len(p)))
	defer func() {
		r.rx.fetch.waitingLen.Store(0)
		r.enlist() // then what was left to this Read is fetched ahead if no other Read comes
	}()
	stop := uint32(0)
	r.await(&r.rd, r.readWant(), func(bool) Events {
		if n, err = r.receive(p); n > 0 || err != nil {
			return 0
		}
		if stop = r.rd.stopBits(); stop == 0 && done != nil && done() {
			stop = stInterrupted
		}
		if stop != 0 {
			return 0
		}
		return r.readWant()
	})
	if stop != 0 {
		if n = r.stopDirect(); n == 0 {
			err = stopError(stop)
		}
	}
	return n, err
}

// receive copies to p what is there, polling for more; (0, nil): nothing yet. If the connection has
// ended while p is the target of transfers, receive aborts the endpoint, which ends them, and returns
// how many bytes had arrived by then.
func (r *reading) receive(p []byte) (int, error) {
	r.lockRx()
	n, err := r.receiveLocked(p)
	broken := r.directBrokenLocked()
	r.unlockRx()
	if broken {
		r.kill(errMidTransfer)
		r.lockRx()
		n = r.rx.fetch.endDirect()
		r.unlockRx()
	}
	return n, err
}

func (r *reading) receiveLocked(p []byte) (n int, err error) {
	rx := &r.rx
	if rx.stage == closed || rx.loan != noLoan || rx.fetch.into.buf != nil {
		return r.receiveNothingLocked()
	}
	before, events := rx.stats.messages, 0
	for n < len(p) {
		if rx.kept > 0 || rx.fetch.cur != nil {
			if b := rx.next(); b != nil {
				k := copy(p[n:], b)
				rx.advance(k)
				n += k
				if len(rx.do.control) > 0 { // Emptied, so that the peer can go on
					r.settleLocked()
				}
				continue
			}
		}
		if rx.stage == over || rx.do.fault != nil {
			break
		}
		if events >= progressMost {
			r.progressAgain()
			break
		}
		if t := rx.fetch.cur; t != nil {
			rx.fetch.setTarget(p, n)
			events += r.progressLocked()
			if rx.fetch.into.buf != nil {
				return r.directDoneLocked()
			}
			if t.unread() == nil && !t.consumed() {
				break // a transfer is in progress
			}
			continue
		}
		if !r.ep.Poll(&rx.ev) {
			rx.polls++
			break
		}
		n += r.receiveEventLocked(p[n:])
		events = rx.do.count(events)
		if rx.ev.Last && n > 0 {
			rx.polls++
			break
		}
	}
	if n == 0 && len(p) > 0 {
		err = r.streamEndLocked()
	}
	rx.stats.bytes += uint64(n)
	r.watchTrickle(uint64(n), rx.stats.messages-before)
	return n, err
}

// watchTrickle recognizes a stream of small messages by what a Read took.
func (r *reading) watchTrickle(bytes, messages uint64) {
	switch {
	case messages > 1 && bytes < trickleBelow*messages:
		r.trickle = trickleFor
	case r.trickle > 0:
		r.trickle--
	}
}

// receiveNothingLocked is receiveLocked while no byte may be copied out of the stream.
func (r *reading) receiveNothingLocked() (n int, err error) {
	rx := &r.rx
	r.progressLocked()
	switch {
	case rx.fetch.into.buf != nil:
		return r.directDoneLocked()
	case rx.stage == closed:
		return 0, r.streamEndLocked()
	}
	return 0, nil // a loan has to end first; until then the peer is answered
}

// receiveEventLocked handles the event of the last Poll; payload goes directly to p if possible.
func (r *reading) receiveEventLocked(p []byte) int {
	rx := &r.rx
	if m := rx.ev.Msg; rx.ev.Kind == Message && rx.isNext(m) {
		h := wire.HeaderOf(m)
		r.countLocked(h)
		return rx.straight(h, m, p)
	}
	r.handleLocked(&rx.ev)
	return 0
}

var errReset = fmt.Errorf("session: the peer reset the connection: %w", syscall.ECONNRESET)

// streamEndLocked returns why nothing more can be read, or nil if more may come. An error that breaks
// the connection is returned each time, even if a Write has returned it.
func (r *reading) streamEndLocked() error {
	err := r.findEndLocked()
	if err != nil && err != io.EOF && !errors.Is(err, ErrClosed) {
		r.told.Store(true)
	}
	return err
}

// findEndLocked is streamEndLocked without noting that the end was returned.
func (r *reading) findEndLocked() error {
	r.settleLocked()
	rx := &r.rx
	pending := rx.unread()
	if p := r.failure.Load(); p != nil && (pending || rx.end == notYet) {
		return *p
	}
	switch {
	case pending:
	case rx.end == byAbort, rx.end != notYet && rx.open && rx.byTaker:
		return errReset
	case rx.end != notYet:
		return io.EOF
	}
	if rx.stage == closed {
		return ErrClosed
	}
	if rx.kept > 0 || rx.fetch.cur.unread() != nil { // it came with the end of a transfer of no bytes
		r.rd.signal() // makes the Read look again
		return nil
	}
	err := r.ep.Err()
	if err == nil {
		return nil
	}
	if r.ep.Poll(&rx.ev) { // it came between the last Poll and the end
		r.handleLocked(&rx.ev)
		r.rd.signal()
		return nil
	}
	switch {
	case errors.Is(err, io.EOF) && !rx.cut && !pending:
		return io.EOF
	case errors.Is(err, io.EOF):
		return fmt.Errorf("session: the peer's process ended in the middle of a write: %w", syscall.ECONNRESET)
	case errors.Is(err, syscall.EPIPE):
		return fmt.Errorf("session: the peer left without closing: %w", syscall.ECONNRESET)
	}
	return err
}

// directDoneLocked ends a Read whose slice is the target of transfers, and returns its result; (0, nil)
// while transfers are in progress.
func (r *reading) directDoneLocked() (int, error) {
	rx := &r.rx
	if r.over() == nil {
		rx.advanceOffer()
		if rx.fetch.waits() {
			return 0, nil
		}
	} else if rx.fetch.busy() { // see receive
		return 0, nil
	}
	n := rx.fetch.endDirect()
	r.progressLocked() // what did not go into the slice can go into chunks
	if n == 0 {
		return 0, r.streamEndLocked()
	}
	return n, nil
}

// stopDirect ends transfers into the slice of a Read that has to return, and returns how many bytes
// have arrived in it. If the peer does not stop in time, the connection is aborted (D12).
func (r *reading) stopDirect() (n int) {
	to := &r.rx.fetch.into
	if to.buf == nil { // it changes only with rd.op held
		return 0
	}
	r.lockRx()
	to.stop = true
	r.unlockRx()
	defer r.killAfter(r.cfg.CancelTimeout, "a transfer that was cancelled did not end")()
	r.attempt(&r.rd, func(bool) Events {
		if n, _ = r.receive(nil); to.buf != nil {
			return r.readWant()
		}
		return 0
	})
	return n
}

// directBrokenLocked reports whether the connection has ended while transfers into a Read's slice are
// in progress.
func (r *reading) directBrokenLocked() bool {
	f := &r.rx.fetch
	if f.into.buf == nil || r.over() == nil {
		return false
	}
	// Events that came since the last poll may have ended the transfers. If there are more events than
	// one call handles, the Read polls again.
	return r.progressLocked() < progressMost && f.busy()
}
