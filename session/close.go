package session

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// closing is the end of a session.
type closing struct {
	begun atomic.Bool   // by Close or Abort
	done  chan struct{} // closed when the endpoint has been given back

	acked atomic.Bool // CloseAck came: the peer has everything

	mu     sync.Mutex
	noMore bool // no worker starts any more; guarded by mu
}

// closeWait is how long Close itself waits for a silent peer, where bytes would be lost
// with the process. The rest of CloseTimeout passes in the background, so that a peer
// that does not read delays nobody; Close does wait for one that reads slowly.
const closeWait = time.Second

// CloseWrite ends this direction: the peer reads io.EOF after what was written. A
// waiting Write fails with ErrClosed. It is no error if the peer has closed, but it
// is one if the peer has reset the connection.
func (s *Session) CloseWrite() error {
	s.wr.set(stShut)
	s.wr.op.Lock()
	defer s.wr.op.Unlock()
	if s.wr.state.Load()&stClosed != 0 {
		return ErrClosed // the endpoint may be retired
	}
	err := s.over() // before the state: see writeBlocked
	if s.wr.state.Load()&stClosed != 0 {
		return ErrClosed
	}
	s.rx.mu.Lock()
	aborted := s.rx.aborted
	s.rx.mu.Unlock()
	switch {
	case aborted:
		return errReset
	case err == nil:
		s.finish(msgShutdown)
		s.leftBehind()
	case !errors.Is(err, syscall.EPIPE): // EPIPE: the peer has closed, and need not be told
		return err
	}
	return nil
}

// CloseRead makes Read return io.EOF from now on, and discards what has arrived or
// still arrives.
func (s *Session) CloseRead() error {
	s.rd.set(stShut)
	s.rd.op.Lock()
	defer s.rd.op.Unlock()
	if s.rd.state.Load()&stClosed != 0 {
		return ErrClosed
	}
	s.rx.mu.Lock()
	defer s.rx.mu.Unlock()
	s.throwAway()
	s.leftBehind()
	return nil
}

// Close ends both directions in order: the peer reads what was written, then
// io.EOF. If data that had arrived was not read, it gets ECONNRESET instead of
// io.EOF, as with TCP. Where bytes live in this process until the peer has them,
// Close waits while the peer goes on taking them; otherwise it returns after about
// a second and delivery goes on in the background. Config.CloseTimeout bounds all
// of it; Closed tells when it is over. Only the first Close returns nil.
func (s *Session) Close() error {
	if !s.closing.begun.CompareAndSwap(false, true) {
		return ErrClosed
	}
	s.close()
	return nil
}

func (s *Session) close() {
	s.rd.set(stClosed)
	s.wr.set(stClosed)
	s.alive.stop()
	// Operations under way see the state and return within CancelTimeout.
	s.rd.op.Lock()
	s.wr.op.Lock()
	s.rd.op.Unlock()
	s.wr.op.Unlock()

	s.rx.mu.Lock()
	begun := s.rx.begun
	s.rx.mu.Unlock()
	if !begun || s.over() != nil {
		giveBack := s.ep.Abort
		if !begun && s.lim.Ring() { // Close does not wait here
			giveBack = s.closeEndpoint
		}
		s.fail(ErrClosed)
		s.detach(giveBack)
		s.ended()
		return
	}
	last := msgClose
	s.rx.mu.Lock()
	if !s.gone {
		s.poll()
		if s.rx.unread() {
			last = msgAbort
		}
		s.rx.leaving = true
		s.throwAway()
	}
	s.rx.mu.Unlock()
	s.finish(last)
	if s.lim.Ring() && s.parted() {
		s.detach(s.closeEndpoint)
		s.ended()
		return
	}
	go s.linger() // owned by Closed
	t := time.NewTicker(closeWait)
	defer t.Stop()
	for before, now := uint64(0), s.heard(); now != before; before, now = now, s.heard() {
		select {
		case <-s.closing.done:
			return
		case <-t.C:
		}
	}
}

// heard returns the number of the peer's messages: it takes what it was sent as long
// as it goes on giving credits back.
func (s *Session) heard() uint64 {
	s.rx.mu.Lock()
	defer s.rx.mu.Unlock()
	return s.rx.messages
}

// Closed returns a channel that is closed when a session that was closed or aborted
// no longer holds anything: no endpoint, no memory, no goroutine.
func (s *Session) Closed() <-chan struct{} { return s.closing.done }

// Abort ends the session at once: what the peer has not got is lost, and it sees
// ECONNRESET. Once Abort has returned, no memory of this end is the target of
// transfers. After Close it ends the delivery that Close left in the background.
func (s *Session) Abort() {
	first := s.closing.begun.CompareAndSwap(false, true)
	s.rd.set(stClosed)
	s.wr.set(stClosed)
	s.alive.stop()
	s.kill(ErrClosed) // also ends the delivery that Close began
	if first {
		s.rd.op.Lock()
		s.wr.op.Lock()
		s.rd.op.Unlock()
		s.wr.op.Unlock()
		s.ended()
	}
}

// linger serves a closed session until the peer has everything, and gives the
// endpoint back.
func (s *Session) linger() {
	late := time.AfterFunc(s.cfg.CloseTimeout, func() {
		s.kill(fmt.Errorf("session: the peer did not take all that was written before Close: %w", syscall.ETIMEDOUT))
	})
	defer late.Stop()
	var w waiter // may use wr: a Write that comes now sees its state and does not wait
	for !s.parted() && s.over() == nil {
		s.poke(w.armed())
		s.flush()
		if s.parted() {
			break
		}
		s.pause(&w, &s.wr, RecvReady|SendReady)
	}
	s.doneWaiting(&w, &s.wr)
	s.detach(s.closeEndpoint)
	s.ended()
}

// finish queues the last message behind all that was written.
func (s *Session) finish(last msgType) {
	tx := &s.tx
	tx.mu.Lock()
	defer tx.mu.Unlock()
	if s.gone || tx.last == msgClose || tx.last == msgAbort {
		return
	}
	if tx.last != last {
		tx.last, tx.lastOut = last, false
	}
	s.flushLocked()
}

// lastDelivered reports whether the last message is where the end of this process
// cannot lose it.
func (s *Session) lastDelivered() bool {
	s.tx.mu.Lock()
	out := s.tx.lastOut && s.tx.nOwed == 0
	s.tx.mu.Unlock()
	return out && (s.lim.Ring() || s.closing.acked.Load())
}

// parted reports lastDelivered, and that the peer no longer writes to memory of this
// end: revoking it would break the peer's connection before it has read everything.
func (s *Session) parted() bool {
	s.rx.mu.Lock()
	granted := s.rx.fetch.granted
	s.rx.mu.Unlock()
	return !granted && s.lastDelivered()
}

// acknowledged handles the peer's CloseAck.
func (s *Session) acknowledged() {
	s.closing.acked.Store(true)
	s.wr.signal()
}

// throwAway gives back everything unread, and makes sure that nothing more is kept.
// rx.mu is held.
func (s *Session) throwAway() {
	rx := &s.rx
	if s.gone || rx.discard {
		return
	}
	rx.discard = true
	for rx.kept > 0 {
		s.release()
	}
	rx.off = 0
	s.empty(rx.inbox.filled - rx.inbox.emptied)
	for _, t := range append(rx.tails, rx.cur) {
		for t != nil && len(t.chunks) > 0 && t.chunks[0].full {
			s.freeChunk(t, 0)
		}
	}
	rx.tails, rx.cur = nil, nil
	if rx.fetch.granted {
		s.sendControl(control{t: msgCancelWrite, id: rx.open.id})
	}
	s.pump()
	s.serviceTx()
}

// detach gives the endpoint back, and with it what is exposed to the peer; giveBack is
// its Close or Abort. No lock may be held.
func (s *Session) detach(giveBack func()) {
	s.rx.mu.Lock()
	s.tx.mu.Lock()
	s.gone = true
	s.tx.mu.Unlock()
	s.rx.mu.Unlock()
	s.giveBack.Do(giveBack)
}

// closeEndpoint is a giveBack for detach.
func (s *Session) closeEndpoint() { s.ep.Close() }

// ended waits for the workers and gives the last memory back.
func (s *Session) ended() {
	s.closing.mu.Lock()
	s.closing.noMore = true
	s.closing.mu.Unlock()
	s.workers.Wait()
	s.rx.mu.Lock()
	for _, t := range append(s.rx.tails, s.rx.open, s.rx.cur) {
		for t != nil && len(t.chunks) > 0 {
			s.freeChunk(t, 0)
		}
	}
	s.rx.tails, s.rx.open, s.rx.cur = nil, nil, nil
	s.rx.mu.Unlock()
	s.freeInbox()
	s.freeOutbox()
	s.ep.Retire()
	close(s.closing.done)
}

// startWorker registers a background goroutine, unless the session has ended.
func (s *Session) startWorker() bool {
	s.closing.mu.Lock()
	defer s.closing.mu.Unlock()
	if s.closing.noMore {
		return false
	}
	s.workers.Add(1)
	return true
}
