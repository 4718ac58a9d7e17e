package session

import (
	"cmp"
	"errors"
	"fmt"
)

// Memory that is lent to the application instead of a buffer of its own: room of the ring
// or of the box to fill, and bytes that have come where they lie. The borrower is the
// application's code, which may take as long as it likes: no lock is held meanwhile,
// control messages go on, and a session that is closed keeps the memory in place until the
// end of the loan.

var (
	// ErrNotReserved means that Commit, or Discard of more than no bytes, was called
	// without a Reserve or Peek before it.
	ErrNotReserved = errors.New("session: nothing is reserved")
	// ErrTooMuch means that Commit or Discard named more bytes than were lent.
	ErrTooMuch = errors.New("session: more bytes than were lent")
)

// Reserve lends room for the next bytes of the stream, at least one byte and up to n, and
// blocks while there is none. The caller fills it from the front and then calls Commit. Until
// then a Write, and another Reserve, waits. The room must not be used after Commit.
// Errors are those of Write.
func (s *Session) Reserve(n int) (room []byte, err error) {
	s.wr.op.Lock()
	defer s.wr.op.Unlock()
	if st := s.wr.state.Load(); st != 0 {
		return nil, writeState(st)
	}
	s.joinIfAway()
	if !s.borrow() {
		return nil, ErrClosed
	}
	if m := s.tx.boxFrom; m > 0 && n >= m {
		s.openBox()
	}
	test := func(sure bool) Events {
		if st := s.wr.state.Load(); st != 0 {
			err = writeState(st)
			return 0
		}
		s.lookForWrite(sure)
		if s.over() == nil {
			s.withSender(func(tx *sender) { room = tx.lend(max(n, 1)) })
		}
		if room != nil {
			return 0
		}
		if err = s.writeBlocked(); err != nil {
			return 0
		}
		return s.writeWant()
	}
	s.await(&s.wr, test(false), test)
	s.leftBehind()
	if room == nil {
		s.giveBackLoan()
	}
	return room, err
}

// Commit sends the first n bytes of what Reserve lent; 0: none. It does not block. An error
// other than ErrNotReserved and ErrTooMuch is why they were not sent. After any error
// nothing is reserved.
func (s *Session) Commit(n int) error {
	lent, sent := false, false
	var err error
	s.withSender(func(tx *sender) {
		if lent = tx.lent != nil; !lent {
			return
		}
		if n < 0 || n > len(tx.lent) {
			err = fmt.Errorf("%w: %d of %d", ErrTooMuch, n, len(tx.lent))
			n = 0
		}
		if s.wr.state.Load()&stPeerClosed != 0 || s.over() != nil {
			tx.unlend(0)
		} else {
			sent = tx.unlend(n)
		}
	})
	if !lent {
		return ErrNotReserved
	}
	if err == nil && !sent && n > 0 {
		err = cmp.Or(s.writeBlocked(), ErrClosed)
	}
	s.giveBackLoan() // last: the endpoint may be retired then
	s.leftBehind()
	return err
}

// Peek lends the next bytes of the stream, as far as they lie in one piece, and blocks while
// there are none. They stay where they are until Discard; until then a Read waits, and
// another Peek returns the same. Errors are those of Read.
func (s *Session) Peek() (b []byte, err error) {
	s.rd.op.Lock()
	defer s.rd.op.Unlock()
	if st := s.rd.state.Load(); st != 0 {
		return nil, readState(st)
	}
	s.joinIfAway()
	test := func(bool) Events {
		if b, err = s.peek(); b != nil || err != nil {
			return 0
		}
		if st := s.rd.state.Load(); st != 0 {
			err = readState(st)
			return 0
		}
		return s.readWant()
	}
	s.await(&s.rd, test(false), test)
	s.leftBehind()
	return b, err
}

func (s *Session) peek() ([]byte, error) {
	s.lockRx()
	defer s.unlockRx()
	rx := &s.rx
	if rx.gone {
		return nil, s.streamEndLocked()
	}
	b := rx.next()
	if b == nil {
		s.lookLocked()
		b = rx.next()
	}
	if b == nil {
		return nil, s.streamEndLocked()
	}
	if !rx.lent {
		if !s.borrow() {
			return nil, ErrClosed
		}
		rx.lent = true
	}
	return b[:len(b):len(b)], nil
}

// Discard ends the loan of Peek: its first n bytes count as read.
func (s *Session) Discard(n int) error {
	s.lockRx()
	rx := &s.rx
	if !rx.lent {
		s.rxMu.Unlock()
		if n == 0 {
			return nil
		}
		return ErrNotReserved
	}
	var err error
	if b := rx.next(); !rx.gone && (n < 0 || n > len(b)) {
		err = fmt.Errorf("%w: %d of %d", ErrTooMuch, n, len(b))
	}
	rx.lent = false
	if !rx.gone {
		if err == nil && n > 0 {
			rx.advance(n)
			rx.bytes += uint64(n)
			rx.lentBytes += uint64(n)
		}
		if rx.discard {
			rx.throw()
		}
	}
	s.unlockRx()
	s.rd.signal()
	s.giveBackLoan()
	s.leftBehind()
	return err
}

// borrow begins a loan: the session's memory stays until its end. It fails once the session
// has ended.
func (s *Session) borrow() bool {
	if !s.startWorker() {
		return false
	}
	s.loans.Add(1)
	return true
}

func (s *Session) giveBackLoan() {
	s.loans.Add(-1)
	s.workers.Done()
}
