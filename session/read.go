package session

import (
	"errors"
	"fmt"
	"io"
	"syscall"
	"time"

	"github.com/sanconn/san/session/internal/spin"
	"github.com/sanconn/san/session/internal/wire"
)

// trickleBelow is how many bytes a message of a stream of small ones has, on average.
const trickleBelow = 1 << 10

// Read reads up to len(p) bytes. It blocks until there is at least one, the
// end of the stream (io.EOF), or an error: ErrClosed, ErrInterrupted,
// syscall.ECONNRESET if the peer vanished or reset the connection (after
// everything that had arrived), ETIMEDOUT if it stopped answering.
func (s *Session) Read(p []byte) (int, error) {
	s.rd.begin()
	n, err := s.read(p)
	s.leftBehind()
	s.rd.op.Unlock()
	return n, err
}

// read is Read, for the holder of rd.op.
func (s *Session) read(p []byte) (n int, err error) {
	if st := s.rd.state.Load(); st != 0 {
		return 0, readState(st)
	}
	s.joinIfAway()
	trickle := s.rx.trickle // written by Reads alone
	if n, err = s.receive(p); n > 0 || err != nil || len(p) == 0 {
		return n, err
	}
	return s.readWaiting(p, trickle)
}

// readState is why a Read has to end.
func readState(st uint32) error {
	switch {
	case st&stClosed != 0:
		return ErrClosed
	case st&stInterrupted != 0:
		return ErrInterrupted
	}
	return io.EOF
}

func (s *Session) readWaiting(p []byte, trickle bool) (n int, err error) {
	s.rx.want.Store(int64(len(p)))
	defer s.rx.want.Store(0)
	if trickle && s.spin > 0 {
		spin.Drain()
	}
	stop := uint32(0)
	s.await(&s.rd, s.readWant(), func(bool) Events {
		if n, err = s.receive(p); n > 0 || err != nil {
			return 0
		}
		if n, _ = s.brokenDirect(); n > 0 {
			return 0
		}
		if stop = s.rd.state.Load(); stop != 0 {
			return 0
		}
		return s.readWant()
	})
	if stop != 0 {
		if n = s.stopDirect(); n == 0 {
			err = readState(stop)
		}
	}
	return n, err
}

// readWant is what a Read waits for: also room, if something of ours needs it.
func (s *Session) readWant() Events {
	if s.rx.fetch.full.Load() || s.txWaits.Load() {
		return RecvReady | SendReady
	}
	return RecvReady
}

// receive copies to p what is there, polling for more; (0, nil): nothing yet.
func (s *Session) receive(p []byte) (int, error) {
	s.lockRx()
	n, err := s.receiveLocked(p)
	s.unlockRx()
	return n, err
}

func (s *Session) receiveLocked(p []byte) (n int, err error) {
	rx := &s.rx
	switch direct := rx.fetch.into != nil; {
	case rx.gone && !direct:
		return 0, s.streamEndLocked()
	case rx.gone: // see brokenDirect
		return 0, nil
	case rx.lent: // the loan has to end first; until then the peer is answered
		s.lookLocked()
		return 0, nil
	case direct:
		s.lookLocked()
		return s.directDoneLocked()
	}
	before, events := rx.messages, 0
	for n < len(p) {
		if rx.kept > 0 || rx.cur != nil {
			if b := rx.next(); b != nil {
				k := copy(p[n:], b)
				rx.advance(k)
				n += k
				if len(rx.do.send) > 0 { // Emptied, for the peer to go on
					s.settleLocked()
				}
				continue
			}
		}
		if rx.dead || rx.do.fault != nil {
			break
		}
		if events >= lookMost {
			s.lookAgain()
			break
		}
		if rx.cur != nil {
			rx.offerSlice(p, n)
			events += s.lookLocked()
			if rx.fetch.into != nil {
				return s.directDoneLocked()
			}
			if rx.cur.unread() == nil && !rx.cur.read() {
				break // a transfer is under way
			}
			continue
		}
		if !s.ep.Poll(&rx.ev) {
			rx.looks++
			break
		}
		n += s.takeLocked(p[n:])
		events += rx.weight()
		if rx.ev.Last && n > 0 {
			rx.looks++
			break
		}
	}
	if n == 0 && len(p) > 0 {
		err = s.streamEndLocked()
	}
	rx.bytes += uint64(n)
	took := rx.messages - before
	rx.trickle = took > 1 && uint64(n) < trickleBelow*took
	return n, err
}

// takeLocked handles the event of the last Poll; payload goes straight to p where it can.
func (s *Session) takeLocked(p []byte) int {
	rx := &s.rx
	if m := rx.ev.Msg; rx.ev.Kind == Message && rx.isNext(m) {
		h := wire.HeaderOf(m)
		s.countLocked(h)
		return rx.straight(h, m, p)
	}
	s.handleLocked(&rx.ev)
	return 0
}

var errReset = fmt.Errorf("session: the peer reset the connection: %w", syscall.ECONNRESET)

// streamEndLocked returns why nothing more can be read; nil if more may come.
func (s *Session) streamEndLocked() error {
	s.settleLocked()
	rx := &s.rx
	pending := rx.unread()
	if p := s.failure.Load(); p != nil && (pending || !rx.shut) {
		return *p
	}
	switch {
	case pending:
	case rx.aborted:
		return errReset
	case rx.shut:
		return io.EOF
	}
	if rx.gone {
		return ErrClosed
	}
	if rx.ready() { // it came in the look that ended a transfer of no bytes
		s.rd.signal() // look again
		return nil
	}
	err := s.ep.Err()
	if err == nil {
		return nil
	}
	if s.ep.Poll(&rx.ev) { // it came between the last Poll and the end
		s.handleLocked(&rx.ev)
		s.rd.signal()
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

// directDoneLocked ends a Read whose slice is the target of transfers, and returns its
// result; (0, nil) while transfers are under way.
func (s *Session) directDoneLocked() (int, error) {
	rx := &s.rx
	if s.over() == nil {
		rx.pump()
		if rx.waits() {
			return 0, nil
		}
	} else if rx.fetch.busy() { // see brokenDirect
		return 0, nil
	}
	n := rx.endDirect()
	s.lookLocked() // what did not go to the slice can go to chunks
	if n == 0 {
		return 0, s.streamEndLocked()
	}
	return n, nil
}

// stopDirect ends transfers into the slice of a Read that has to return, and returns how
// many bytes it got. If the peer does not stop in time, the connection is aborted (D12).
func (s *Session) stopDirect() (n int) {
	s.lockRx()
	direct := s.rx.stopDirect()
	s.unlockRx()
	if !direct {
		return 0
	}
	limit := time.AfterFunc(s.cfg.CancelTimeout, func() {
		s.kill(fmt.Errorf("session: a transfer that was cancelled did not end: %w", syscall.ETIMEDOUT))
	})
	defer limit.Stop()
	test := func(bool) Events {
		s.lockRx()
		if !s.rx.gone {
			s.lookLocked()
			n, _ = s.directDoneLocked()
		}
		busy := s.rx.fetch.into != nil
		s.unlockRx()
		if !busy {
			return 0
		}
		if k, broken := s.brokenDirect(); broken {
			n = k
			return 0
		}
		return s.readWant()
	}
	s.await(&s.rd, test(false), test)
	return n
}

// brokenDirect checks whether the connection has ended while a Read's slice is the
// target of transfers. If so it aborts the endpoint, which ends them, and n is what
// had arrived by then. No lock but rd.op may be held.
func (s *Session) brokenDirect() (n int, broken bool) {
	s.lockRx()
	f := &s.rx.fetch
	switch {
	case f.into == nil:
	case s.rx.gone:
		broken = true
	case s.over() != nil:
		// Events that came since the last look, by this Read or anybody else, may have
		// ended them. If there are more than one look takes, the Read looks again.
		broken = s.lookLocked() < lookMost && f.busy()
	}
	s.unlockRx()
	if !broken {
		return 0, false
	}
	s.kill(fmt.Errorf("session: the connection ended in the middle of a transfer: %w", syscall.ECONNRESET))
	s.lockRx()
	n = s.rx.endDirect()
	s.unlockRx()
	return n, true
}
