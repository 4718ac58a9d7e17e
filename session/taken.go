package session

import "errors"

// ErrTaken means that the layer above has taken the operations of a direction from the application:
// TakeRead, TakeWrite.
var ErrTaken = errors.New("session: taken")

// ErrCut is ErrTaken in the middle of a Write: the peer gets some of its bytes, and no other Write may
// come before the rest. TakeWrite reports that to the taker.
var ErrCut = errors.New("session: taken in the middle of a Write")

// StopRead makes waiting and later Reads, Peeks and PeekExclusives fail with ErrTaken until
// GiveBackRead. Meanwhile only ReadTaken reads.
func (r *reading) StopRead() { r.rd.set(stTaken) }

// TakeRead is StopRead, and returns when no such operation is in progress and nothing is lent any more,
// or this end was closed. It waits for loans even if the connection is over.
func (r *reading) TakeRead() {
	r.StopRead()
	defer r.rd.asTaker()()
	r.attempt(&r.rd, func(bool) Events {
		r.lockRx()
		lent := r.rx.loan != noLoan
		r.unlockRx()
		if !lent || r.rd.state.Load()&stClosed != 0 {
			return 0
		}
		return r.readWant()
	})
}

// TakeWrite is TakeRead for Write, WriteBuffers and Reserve, until GiveBackWrite. A Write in progress
// returns what it has taken. cut: a Write was in its middle.
func (w *writing) TakeWrite() (cut bool) {
	w.wr.set(stTaken)
	defer w.wr.asTaker()()
	w.until(func() (free bool) {
		w.withSender(func(tx *sender) { free = tx.reserved == nil })
		return free
	}, func() error {
		if w.wr.state.Load()&stClosed != 0 {
			return ErrClosed
		}
		return nil
	})
	cut, w.writeCut = w.writeCut, false
	return cut
}

// GiveBackRead ends TakeRead. cut: if the stream ends after the peer's last note, the application finds
// a reset, because that end is the Shutdown of the peer's taker, and the stream of the peer's program
// goes on elsewhere.
func (r *reading) GiveBackRead(cut bool) {
	r.lockRx()
	r.rx.byTaker = cut
	r.unlockRx()
	r.rd.state.And(^uint32(stTaken))
}

// GiveBackWrite ends TakeWrite.
func (w *writing) GiveBackWrite() { w.wr.state.And(^uint32(stTaken)) }

// ReadTaken is Read for the taker. InterruptRead does not affect it. It waits at most until done
// returns true, and then returns ErrInterrupted. done may be nil; LookAgain makes it be called again.
func (r *reading) ReadTaken(p []byte, done func() bool) (int, error) {
	defer r.rd.asTaker()()
	n, err := r.readHeld(p, done)
	r.enlistPending()
	return n, err
}

// AwaitTaken waits, for the taker of Read, until done returns true or the connection is over. It
// handles what comes meanwhile. LookAgain makes done be called again.
func (r *reading) AwaitTaken(done func() bool) {
	defer r.rd.asTaker()()
	r.attempt(&r.rd, func(sure bool) Events {
		if done() || r.rd.stopBits() != 0 || r.over() != nil {
			return 0
		}
		r.progress(sure)
		return r.readWant()
	})
	r.notifyEnd() // with earlier notes, which may not have been handled yet
}

// MostLeft returns how many bytes of the peer's stream can be unread once the peer has stopped, without
// a ring: what this end has room for, and the peer's send buffer.
func (r *reading) MostLeft() uint64 {
	return uint64(r.bounds.budget) + uint64(chunkFloor+r.bounds.inbox+r.lim.Window*r.lim.MaxMessage+mostBuffer)
}

// LookAgain makes AwaitTaken and ReadTaken call done. It does not block.
func (r *reading) LookAgain() { r.rd.signal() }

// WriteTaken is Write for the taker. InterruptWrite does not affect it.
func (w *writing) WriteTaken(p []byte) (int, error) {
	defer w.wr.asTaker()()
	n, err := w.writeHeld(p, false)
	w.enlistPending()
	return n, err
}

// Over returns why the connection is over, or nil. If the process of a ring's peer has ended, or
// closed, the error is EPIPE. Once this end has closed and released everything, it is ErrClosed.
func (s *Session) Over() error {
	s.epMu.Lock()
	defer s.epMu.Unlock()
	if s.retired {
		return ErrClosed
	}
	return s.over()
}

// Withdraw takes a session back that its peer has not taken; then the session has to be aborted. It
// returns false if the peer has taken it, or may yet: see Withdrawer.
func (s *Session) Withdraw() bool {
	w, ok := s.provider.(Withdrawer)
	return ok && w.Withdraw()
}
