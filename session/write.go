package session

import (
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/sanconn/san/session/internal/wire"
)

// Write writes all of p, or returns how many bytes were taken and why not more.
// Once it has returned, the session or the peer has the bytes and p is no longer
// touched. Errors: ErrClosed, ErrInterrupted, syscall.EPIPE (the peer no longer
// reads), ECONNRESET, ETIMEDOUT.
func (s *Session) Write(p []byte) (int, error) {
	if n := len(p); n <= minFragment && n > 0 && s.writeAtOnce(p) {
		return n, nil
	}
	s.wr.begin()
	n, err := s.write(p, false)
	s.leftBehind()
	s.wr.op.Unlock()
	return n, err
}

// writeAtOnce is Write for a small p when nothing stands in its way. It needs only
// txMu, as there is no other Write in progress to wait for.
func (s *Session) writeAtOnce(p []byte) (sent bool) {
	s.txMu.Lock()
	if !s.wr.op.held() && s.wr.state.Load() == 0 && !s.idle.away.Load() && s.failure.Load() == nil {
		sent = s.tx.whole(p)
	}
	s.unlockTx()
	return sent
}

// WriteBuffers writes the slices in order, as one Write, packing small ones into
// one message. It does not change v.
func (s *Session) WriteBuffers(v [][]byte) (n int64, err error) {
	for len(v) > 0 && len(v[len(v)-1]) == 0 {
		v = v[:len(v)-1] // so that the last slice ends the Write
	}
	s.wr.begin()
	defer s.wr.op.Unlock()
	defer s.leftBehind()
	if len(v) == 0 {
		_, err = s.write(nil, false)
	}
	for len(v) > 0 && err == nil {
		var k int
		if pack := s.packable(v); pack > 1 && s.wr.state.Load() == 0 {
			if k = s.sendPacked(v[:pack], pack < len(v)); k > 0 {
				n += int64(k)
				v = v[pack:]
				continue
			}
		}
		k, err = s.write(v[0], len(v) > 1)
		n += int64(k)
		v = v[1:]
	}
	return n, err
}

// packable is how many slices from the front fit into one message of moderate size.
func (s *Session) packable(v [][]byte) int {
	const packLimit = 16 << 10 // above, a message's own cost is small compared with the copy
	limit, sum := min(packLimit, s.tx.maxMsg-wire.HeaderLen), 0
	for i, b := range v {
		if sum += len(b); sum > limit {
			return i
		}
	}
	return len(v)
}

func (s *Session) sendPacked(v [][]byte, more bool) (n int) {
	if s.failure.Load() != nil {
		return 0
	}
	s.txMu.Lock()
	n = s.tx.packed(v, more)
	s.unlockTx()
	return n
}

// write is Write, for the holder of wr.op; more: the Write goes on after p.
func (s *Session) write(p []byte, more bool) (n int, err error) {
	if st := s.wr.state.Load(); st != 0 {
		return 0, writeState(st)
	}
	s.joinIfAway()
	if t := s.tx.threshold; t > 0 && len(p) >= t {
		if n, err = s.writeOffered(p, more); n == len(p) || err != nil {
			return n, err
		}
	}
	if m := s.tx.boxFrom; m > 0 && len(p)-n >= m {
		s.openBox()
	}
	return s.writeCopied(p, n, more)
}

// writeCopied copies p[n:] to messages or the box, waiting for room.
func (s *Session) writeCopied(p []byte, n int, more bool) (int, error) {
	var err error
	for n < len(p) && err == nil {
		if st := s.wr.state.Load(); st != 0 {
			return n, writeState(st)
		}
		if k := s.take(p[n:], more); k > 0 {
			n += k
			continue
		}
		s.await(&s.wr, s.writeWant(), func(sure bool) Events {
			if st := s.wr.state.Load(); st != 0 {
				err = writeState(st)
				return 0
			}
			s.lookForWrite(sure)
			k := s.take(p[n:], more)
			if n += k; k > 0 {
				return 0
			}
			if err = s.writeBlocked(); err != nil {
				return 0
			}
			return s.writeWant()
		})
	}
	return n, err
}

// take takes bytes from the front of p, and returns how many.
func (s *Session) take(p []byte, more bool) (n int) {
	if s.over() != nil {
		return 0 // not into the box of a connection that has ended
	}
	s.txMu.Lock()
	n = s.tx.take(p, more)
	s.unlockTx()
	return n
}

// writeWant is what a Write waits for. While a Read looks for what comes, that may be less.
func (s *Session) writeWant() Events {
	if s.rd.op.held() {
		return s.kind.writeWant
	}
	return SendReady | RecvReady
}

// lookForWrite takes what comes from the peer while a Write waits, unless a Read does.
func (s *Session) lookForWrite(sure bool) {
	if sure || !s.rd.op.held() {
		s.look(sure)
	}
}

// writeBlocked returns why a Write that got no further must not go on. It reads the reason
// for the connection's end before the state: a Close or Abort of this end sets the state
// before it ends the connection, and takes precedence.
func (s *Session) writeBlocked() error {
	err := s.over()
	if st := s.wr.state.Load(); st != 0 {
		return writeState(st)
	}
	return err
}

// writeState is why a Write has to end.
func writeState(st uint32) error {
	switch {
	case st&stClosed != 0:
		return ErrClosed
	case st&stInterrupted != 0:
		return ErrInterrupted
	case st&stShut != 0:
		return ErrClosed
	}
	return syscall.EPIPE
}

// errNotTaken: memory could not be exposed here, or the peer could not reach it.
var errNotTaken = errors.New("memory cannot be registered for RDMA")

// writeOffered writes from the front of p by offers, as long as what is left is large
// enough and can be registered.
func (s *Session) writeOffered(p []byte, more bool) (n int, err error) {
	for len(p)-n >= s.tx.threshold {
		k, err := s.writeOffer(p[n:], more)
		n += k
		if errors.Is(err, errNotTaken) {
			s.look(true) // if the peer refuses because it closes, that comes next
			return n, nil
		}
		if err != nil && n < len(p) { // a complete one may have ended with an error
			return n, err
		}
	}
	return n, nil
}

// writeOffer offers as much of p as one exposure takes, and waits until the peer
// has it. It returns how many bytes of p are the peer's.
func (s *Session) writeOffer(p []byte, more bool) (n int, err error) {
	byRead := s.tx.byRead
	first := s.tx.offerFirst(len(p))
	tail := p[first:]
	var desc Descriptor
	if byRead {
		tail = tail[:min(len(tail), s.lim.MaxExpose)]
		if desc, err = s.mem.Expose(tail, RemoteRead); err != nil {
			return 0, fmt.Errorf("%w: %w", errNotTaken, err)
		}
	}
	exposed := byRead
	if err = s.openOffer(p[:first], desc, len(tail), more || first+len(tail) < len(p)); err == nil {
		err = s.awaitOffer(tail)
		if err != nil {
			exposed = !s.withdraw(desc, tail) && exposed
		}
		s.withSender(func(tx *sender) { n = tx.offerEnded(first) })
		if n < len(tail) && err == nil {
			if err = s.writeBlocked(); err == nil {
				err = errNotTaken
			}
		}
		n += first
	}
	if exposed {
		s.mem.Revoke(desc)
	}
	return n, err
}

// openOffer sends the message of an offer of total bytes behind first.
func (s *Session) openOffer(first []byte, d Descriptor, total int, more bool) (err error) {
	test := func(sure bool) Events {
		s.lookForWrite(sure)
		sent := false
		if s.failure.Load() == nil {
			s.withSender(func(tx *sender) { sent = tx.sendOffer(first, d, total, more) })
		}
		if sent {
			return 0
		}
		if err = s.writeBlocked(); err != nil {
			return 0
		}
		return s.writeWant()
	}
	s.await(&s.wr, test(false), test)
	return err
}

// awaitOffer waits until the open offer of tail is over.
func (s *Session) awaitOffer(tail []byte) (err error) {
	test := func(sure bool) Events {
		s.lookForWrite(sure)
		if s.driveOffer(tail) {
			return 0
		}
		if err = s.writeBlocked(); err != nil {
			return 0
		}
		return s.writeWant()
	}
	s.await(&s.wr, test(false), test)
	return err
}

func (s *Session) driveOffer(tail []byte) (over bool) {
	s.txMu.Lock()
	over = s.tx.driveOffer(tail)
	s.unlockTx()
	return over
}

// withdraw ends the open offer before the peer has all of it (D12). If the peer does not
// answer within CancelTimeout, the connection is aborted. revoked: the memory has been
// revoked.
func (s *Session) withdraw(d Descriptor, tail []byte) (revoked bool) {
	if s.over() != nil {
		return s.withdrawEnded(d)
	}
	s.withSender((*sender).withdraw)
	limit := time.AfterFunc(s.cfg.CancelTimeout, func() {
		s.kill(fmt.Errorf("session: the peer did not give up a transfer that was cancelled: %w", syscall.ETIMEDOUT))
	})
	defer limit.Stop()
	ended := false
	test := func(sure bool) Events {
		s.lookForWrite(sure)
		if s.driveOffer(tail) {
			return 0
		}
		if ended = s.over() != nil; ended {
			return 0
		}
		return s.writeWant()
	}
	s.await(&s.wr, test(false), test)
	return ended && s.withdrawEnded(d)
}

// withdrawEnded is withdraw on a connection that has ended. It avoids aborting it where
// it can, so that what has arrived can still be read.
func (s *Session) withdrawEnded(d Descriptor) (revoked bool) {
	if s.failure.Load() == nil && s.tx.byRead {
		s.mem.Revoke(d)
		return true
	}
	s.look(true) // for completions of posted writes, and what came before them
	settled := false
	s.withSender(func(tx *sender) { settled = tx.offer.settled() })
	if s.tx.byRead || !settled { // the peer may still read our memory, or our own writes may
		s.kill(fmt.Errorf("session: the connection ended in the middle of a transfer: %w", syscall.ECONNRESET))
	}
	return false
}
