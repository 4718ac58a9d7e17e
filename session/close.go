package session

import (
	"errors"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sanconn/san/session/internal/wire"
)

// closing is the end of a session.
type closing struct {
	begun atomic.Bool   // by Close or Abort
	done  chan struct{} // closed when the endpoint was given back
}

// closeWait is how long Close itself waits for a silent peer, if bytes would be lost with the process.
// The rest of CloseTimeout passes in the background, so that a peer that does not read delays no
// caller. Close does wait for a peer that reads slowly, but at least reportMost in that time.
const closeWait = time.Second

// CloseWrite ends this direction: the peer reads io.EOF after what was written. A
// waiting Write fails with ErrClosed. It is no error if the peer has closed, but it
// is one if the peer has reset the connection.
func (s *Session) CloseWrite() error {
	s.wr.set(stShut)
	s.ur.signal()
	s.wr.op.Lock()
	defer s.wr.op.Unlock()
	if s.wr.state.Load()&stClosed != 0 {
		return ErrClosed // the endpoint may be retired
	}
	err := s.over() // before the state: see writeBlocked
	if s.wr.state.Load()&stClosed != 0 {
		return ErrClosed
	}
	s.rxMu.Lock()
	aborted := s.rx.end == byAbort
	s.rxMu.Unlock()
	switch {
	case aborted:
		return errReset
	case err == nil:
		s.withSender(func(tx *sender) { tx.finish(wire.TypeShutdown) })
		s.enlistPending()
	case !errors.Is(err, syscall.EPIPE): // EPIPE: the peer has closed, and needs no Shutdown
		return err
	}
	return nil
}

// ResetAtDeath sets what the peer finds if this process ends without CloseWrite or Close: with on
// ECONNRESET; otherwise io.EOF, if all that was written outlives the process. Off takes effect with the
// next bytes.
func (w *writing) ResetAtDeath(on bool) {
	w.withSender(func(tx *sender) {
		tx.cutDue = on && (tx.cutDue || !tx.abrupt && w.ring) // without a ring a death is a reset anyway
		tx.abrupt = on
		tx.flush()
	})
	w.enlistPending()
}

// InWrite makes the peer find ECONNRESET if this process ends before the next bytes, which belong to a
// Write that has begun on another carrier.
func (w *writing) InWrite() {
	w.withSender(func(tx *sender) {
		if w.ring && !tx.abrupt {
			tx.cutDue = true
			tx.flush()
			tx.cutDue = false
		}
	})
}

// Close ends both directions in order: the peer reads what was written, then io.EOF. If data that had
// arrived was not read, the peer finds ECONNRESET instead of io.EOF, as with TCP. If bytes are in this
// process until the peer has them, Close waits as long as the peer goes on taking them. Otherwise it
// returns after about a second, and delivery goes on in the background. Config.CloseTimeout bounds all
// of it; Closed reports its end. Only the first Close returns nil.
func (s *Session) Close() error { return s.close(false) }

// CloseUnread is Close for a caller that has unread bytes of the peer's elsewhere: the peer finds
// ECONNRESET.
func (s *Session) CloseUnread() error { return s.close(true) }

func (s *Session) close(unread bool) error {
	if !s.closing.begun.CompareAndSwap(false, true) {
		return ErrClosed
	}
	s.stopOperations()
	if !s.mayFinish() || s.over() != nil {
		s.kill(ErrClosed)
		s.retire()
		return nil
	}
	last := s.discardInput(unread)
	s.withSender(func(tx *sender) { tx.finish(last) })
	if s.drained() {
		s.detach(func() { s.ep.Close() })
		s.retire()
		return nil
	}
	over := make(chan struct{})
	go s.drain(over) // owned by Closed
	s.awaitProgress(over)
	return nil
}

// mayFinish reports whether the peer understands a last message: the negotiation has ended, or the
// message follows this end's negotiation message in a ring.
func (s *Session) mayFinish() (may bool) {
	s.rxMu.Lock()
	begun := s.rx.stage != negotiating
	s.rxMu.Unlock()
	s.withSender(func(tx *sender) { may = begun || s.ring && tx.stats.messages != 0 })
	return may
}

// stopOperations ends all operations in progress, which takes up to CancelTimeout.
func (s *Session) stopOperations() {
	s.rd.set(stClosed)
	s.wr.set(stClosed)
	s.alive.stop()
	for _, sd := range s.sides() {
		sd.signal()
		sd.op.Lock()
	}
	for _, sd := range s.sides() {
		sd.op.Unlock()
	}
}

// discardInput discards what has come and still comes, and returns the message that ends this
// direction. unread: the caller has unread bytes elsewhere.
func (s *Session) discardInput(unread bool) (last wire.Type) {
	s.lockRx()
	defer s.unlockRx()
	last = wire.TypeClose
	s.progressLocked()
	if unread || s.rx.unread() {
		last = wire.TypeAbort
	}
	s.rx.discard()
	return last
}

// awaitProgress waits until delivery is over, as long as the peer goes on taking what it was sent.
func (s *Session) awaitProgress(over <-chan struct{}) {
	t := time.NewTicker(closeWait)
	defer t.Stop()
	for before, now := ^uint64(0), s.peerProgress(); now != before; before, now = now, s.peerProgress() {
		select {
		case <-over:
			return
		case <-t.C:
		}
	}
}

// Ended returns a channel that is closed when the connection is over at this end: what Close delivers
// was delivered, or the session was aborted. It does not wait for loans.
func (s *Session) Ended() <-chan struct{} { return s.ended }

// Closed returns a channel that is closed when a session that was closed or aborted has released
// everything: endpoint, memory, goroutines. It waits for the end of loans.
func (s *Session) Closed() <-chan struct{} { return s.closing.done }

// Delivered reports, after Close, whether the peer has all that was written, or will have it even if
// this process ends. A peer that has also closed in order, which it does only after it has read the
// whole stream, may have gone before it could confirm that.
func (s *Session) Delivered() bool {
	if s.ring || s.acked.Load() {
		return true
	}
	s.rxMu.Lock()
	defer s.rxMu.Unlock()
	return s.rx.end == byClose
}

// Abort ends the session at once. The peer finds ECONNRESET, and what it has not received is lost. Once
// Abort has returned, no transfer accesses memory of this end. After Close it ends the delivery that
// Close left in the background.
func (s *Session) Abort() {
	first := s.closing.begun.CompareAndSwap(false, true)
	s.rd.set(stClosed)
	s.wr.set(stClosed)
	s.kill(ErrClosed) // also ends the delivery that Close began
	if first {
		s.stopOperations()
		s.retire()
	}
}

// Fail ends the connection at once, because the peer has broken a protocol of the layer above. It
// returns the error that operations find.
func (s *Session) Fail(err error) error {
	err = brokeProtocol(err)
	s.kill(err)
	return err
}

// drain serves a closed session until the peer has everything, and gives the endpoint back. Then it
// closes over, even if the application still has a loan.
func (s *Session) drain(over chan<- struct{}) {
	defer close(over)
	defer s.killAfter(s.cfg.CloseTimeout, "the peer did not take all that was written before Close")()
	s.until(s.drained, s.over) // a Write that comes now sees the state, and does not wait
	s.detach(func() { s.ep.Close() })
	s.retire()
}

// drained reports whether the end of this process can no longer lose the last message.
func (s *Session) drained() (ok bool) {
	s.withSender(func(tx *sender) { ok = tx.last.sent && len(tx.control.list) == 0 })
	return ok && (s.ring || s.acked.Load())
}

// retire gives the remaining memory back, in the background if the application still has some.
func (s *Session) retire() {
	if s.loans.Load() > 0 {
		go s.retireNow() // owned by Closed
		return
	}
	s.retireNow()
}

func (s *Session) retireNow() {
	s.workers.stop()
	s.rxMu.Lock()
	s.rx.free()
	s.rxMu.Unlock()
	var buf []byte
	s.withSender(func(tx *sender) { buf = tx.buffer.reset() }) // a late Write may still look at it
	s.freeBuffer(buf)
	s.epMu.Lock()
	s.retired = true
	s.epMu.Unlock()
	s.ep.Retire()
	live.Delete(s.number)
	close(s.closing.done)
}
