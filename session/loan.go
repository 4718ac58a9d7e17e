package session

import (
	"cmp"
	"errors"
	"fmt"
	"syscall"
)

// Memory that is lent to the application in place of a buffer of its own: room of a message or of the
// send buffer for it to fill, and bytes that have come, in the memory where they are. The application
// may keep a loan as long as it likes: no lock is held meanwhile, control messages go on, and a session
// that is closed keeps the memory in place until the end of the loan.

var (
	// ErrNotReserved means that Commit, or Discard of some bytes, was called without a Reserve or Peek
	// before it.
	ErrNotReserved = errors.New("session: nothing is reserved")
	// ErrTooMuch means that Commit or Discard was called for more bytes than were lent.
	ErrTooMuch = errors.New("session: more bytes than were lent")
)

// Reserve lends room for the next bytes of the stream, at least one byte and at most n, and blocks
// while there is none. The caller fills the room from its front and then calls Commit. Until then
// Writes and other Reserves wait. The room must not be used after Commit. Errors are those of Write.
func (w *writing) Reserve(n int) (room []byte, err error) {
	n = min(max(n, 1), maxBuffer) // so that lengths do not overflow
	w.wr.begin()
	defer w.wr.op.Unlock()
	if st := w.wr.stopBits(); st&(stClosed|stTaken) != 0 {
		return nil, stopError(st)
	}
	w.enlist()
	w.borrow() // the session does not end while wr.op is held
	w.prepareBuffer(n)
	err = w.until(func() bool {
		return w.wr.state.Load() == 0 && w.withRoom(func(tx *sender) bool {
			room = tx.reserveRoom(n)
			return room != nil
		})
	}, w.writeBlocked)
	if err != nil && w.unaware(err) {
		room = w.reserveInVain(n)
	}
	w.enlistPending()
	if room != nil {
		return room, nil
	}
	w.endBorrow()
	_, err = w.outcome(0, n, err)
	return nil, cmp.Or(err, error(syscall.EPIPE)) // the peer has closed, and something is lent already
}

// reserveInVain lends memory whose bytes Commit throws away: the peer has closed, but this end has not
// found that, so its next bytes are accepted (see outcome). It returns nil if something is lent
// already.
func (w *writing) reserveInVain(n int) (room []byte) {
	w.withSender(func(tx *sender) {
		if tx.reserved == nil {
			room = make([]byte, min(n, minFragment))
			tx.reserved = room
		}
	})
	return room
}

// Commit sends the first n bytes of what Reserve has lent; 0: none. It does not block. After an error
// nothing is reserved and nothing was sent. The error is why, or ErrNotReserved or ErrTooMuch.
func (w *writing) Commit(n int) (err error) {
	reserved, sent := false, true
	w.withSender(func(tx *sender) {
		switch reserved = tx.reserved != nil; {
		case !reserved:
			err = ErrNotReserved
		case n < 0 || n > len(tx.reserved):
			err = fmt.Errorf("%w: %d of %d", ErrTooMuch, n, len(tx.reserved))
			tx.endLoan(0)
		case n == 0:
			tx.endLoan(0)
		case w.wr.state.Load()&stPeerClosed != 0 || w.over() != nil: // also for the room of reserveInVain
			sent = false
			tx.endLoan(0)
		default:
			sent = tx.endLoan(n)
		}
	})
	if !reserved {
		return err
	}
	if !sent {
		_, err = w.outcome(0, n, cmp.Or(w.writeBlocked(), ErrClosed))
	}
	w.endBorrow() // last, as the endpoint may be retired then
	w.enlistPending()
	return err
}

// Peek lends the next bytes of the stream, as many as are in one piece, and blocks while there are
// none. They stay where they are until Discard. Until then Reads wait, and another Peek returns the
// same bytes. Errors are those of Read.
func (r *reading) Peek() ([]byte, error) { return r.lend(true, shared) }

// PeekExclusive is Peek for an exclusive loan: it waits for the end of any other loan, and Peek waits
// for the end of this one. With wait it waits for bytes of the peer; otherwise nil without an error
// means that nothing has come.
func (r *reading) PeekExclusive(wait bool) ([]byte, error) { return r.lend(wait, exclusive) }

// lend begins a loan, or joins the present one unless either is exclusive.
func (r *reading) lend(wait bool, as loan) (b []byte, err error) {
	r.rd.begin()
	defer r.rd.op.Unlock()
	if st := r.rd.state.Load(); st != 0 {
		return nil, stopError(st)
	}
	r.enlist()
	r.attempt(&r.rd, func(bool) Events {
		coming := false
		if b, coming, err = r.tryLend(as); b != nil || err != nil || !wait && !coming {
			return 0
		}
		if st := r.rd.state.Load(); st != 0 {
			err = stopError(st)
			return 0
		}
		return r.readWant()
	})
	r.enlistPending()
	return b, err
}

// tryLend is lend without the wait. coming: another look, perhaps after a wait, finds bytes or an end,
// without anything more from the application at the other end.
func (r *reading) tryLend(as loan) (b []byte, coming bool, err error) {
	r.lockRx()
	defer r.unlockRx()
	rx := &r.rx
	if rx.stage == closed {
		return nil, false, r.streamEndLocked()
	}
	if rx.loan != noLoan && max(rx.loan, as) == exclusive {
		r.progressLocked()
		return nil, true, nil
	}
	if b = rx.next(); b == nil {
		r.progressLocked()
		b = rx.next()
	}
	if b == nil {
		err = r.streamEndLocked()
		return nil, rx.unread() || rx.end != notYet || r.ep.Err() != nil, err
	}
	if rx.loan == noLoan {
		r.borrow() // the session's end waits for it, before the endpoint retires
		rx.loan = as
	}
	return b[:len(b):len(b)], false, nil
}

// Discard ends the loan of Peek: its first n bytes count as read.
func (r *reading) Discard(n int) error {
	r.lockRx()
	rx := &r.rx
	if rx.loan == noLoan {
		r.rxMu.Unlock()
		if n == 0 {
			return nil
		}
		return ErrNotReserved
	}
	rx.loan = noLoan
	var err error
	if rx.stage != closed {
		err = rx.endLoan(n)
	}
	r.unlockRx()
	r.rd.signal()
	r.endBorrow()
	r.enlistPending()
	return err
}
