package session

import (
	"cmp"
	"errors"
	"syscall"

	"github.com/sanconn/san/session/internal/wire"
)

// Write writes all of p, or returns how many bytes were taken and why not more. Once it has returned,
// the session or the peer has the bytes and p is not accessed any more. Errors: ErrClosed,
// ErrInterrupted, and those of the connection (see outcome): syscall.EPIPE (the peer does not read any
// more), ECONNRESET, ETIMEDOUT. A Write of no bytes returns the error that there is to report.
func (w *writing) Write(p []byte) (int, error) {
	if n := len(p); n > 0 && n <= w.terms.whole && w.writeAtOnce(p) {
		return n, nil
	}
	w.wr.begin()
	n, err := w.writeHeld(p, false)
	n, err = w.outcome(n, len(p), err)
	w.enlistPending()
	w.wr.op.Unlock()
	return n, err
}

// writeAtOnce is Write for what fits into one message, if that can be sent at once. It needs only txMu,
// because no other Write is in progress.
func (w *writing) writeAtOnce(p []byte) (sent bool) {
	w.txMu.Lock()
	if !w.wr.op.held() && w.wr.state.Load() == 0 && !w.idle.unlisted.Load() && w.over() == nil {
		sent = w.tx.tryWhole(p)
	}
	w.unlockTx()
	w.enlistPending() // for bytes in the send buffer
	return sent
}

// WriteBuffers writes the slices in order, as one Write, packing small ones into
// one message. It does not change v.
func (w *writing) WriteBuffers(v [][]byte) (n int64, err error) {
	for len(v) > 0 && len(v[len(v)-1]) == 0 {
		v = v[:len(v)-1] // so that the last slice ends the Write
	}
	w.wr.begin()
	defer w.wr.op.Unlock()
	defer w.enlistPending()
	size := 0
	for _, b := range v {
		size += len(b)
	}
	if len(v) == 0 {
		_, err = w.writeHeld(nil, false)
	}
	for len(v) > 0 && err == nil {
		count := w.packable(v)
		k := w.sendPacked(v[:count], count < len(v))
		if k == 0 {
			count = 1
			k, err = w.writeHeld(v[0], len(v) > 1)
		}
		n += int64(k)
		v = v[count:]
	}
	done, err := w.outcome(int(n), size, err)
	return int64(done), err
}

// packable returns how many slices from the front fit into one message of moderate size.
func (w *writing) packable(v [][]byte) int {
	const packLimit = 16 << 10 // above it, a message's own cost is small compared with the copy
	limit, sum := min(packLimit, w.terms.maxMsg-wire.HeaderLen), 0
	for i, b := range v {
		if sum += len(b); sum > limit {
			return i
		}
	}
	return len(v)
}

// sendPacked sends slices in one message, or none of them.
func (w *writing) sendPacked(v [][]byte, more bool) (n int) {
	if len(v) > 1 && w.wr.state.Load() == 0 && w.failure.Load() == nil {
		w.withSender(func(tx *sender) { n = tx.tryPacked(v, more) })
	}
	return n
}

// writeHeld is Write for the holder of wr.op; more: the Write goes on after p.
func (w *writing) writeHeld(p []byte, more bool) (n int, err error) {
	if st := w.wr.stopBits(); st != 0 {
		return 0, stopError(st)
	}
	w.enlist()
	if len(p) == 0 {
		w.progress(false) // handle what has come
		return 0, w.writeBlocked()
	}
	if w.terms.large(len(p)) && w.pays(p) {
		if n = w.writeOffered(p, more); n == len(p) {
			return n, nil
		}
		if err = w.writeBlocked(); err != nil { // so that no inbox is requested for bytes that are not written
			return n, err
		}
	}
	w.prepareBuffer(len(p) - n)
	return w.writeCopied(p, n, more)
}

// writeCopied copies p[n:] into messages or the send buffer, and waits for room.
func (w *writing) writeCopied(p []byte, n int, more bool) (int, error) {
	var err error
	copied := func() bool {
		return w.wr.stopBits() == 0 && w.withRoom(func(tx *sender) bool {
			k := tx.trySend(p[n:], more)
			n += k
			return k > 0
		})
	}
	for n < len(p) && err == nil {
		if !copied() {
			err = w.until(copied, w.writeBlocked)
		}
	}
	return n, err
}

// withRoom calls try with the sender, and returns its result. If there is no room, it requests the
// peer's inbox. If the inbox has come meanwhile, there may be room, and try is called again.
func (w *writing) withRoom(try func(*sender) bool) (done bool) {
	for opens := true; opens && w.over() == nil; { // a connection that has ended opens no send buffer
		w.withSender(func(tx *sender) {
			done = try(tx)
			opens = !done && tx.wantInbox(0)
		})
		if opens {
			w.prepareBuffer(0)
		}
	}
	return done
}

// writeWant returns what a Write waits for. Room in a ring needs no message of the peer's, so messages
// are left to a Read that looks for them.
func (w *writing) writeWant() Events {
	if w.ring && w.rd.op.held() {
		return SendReady
	}
	return SendReady | RecvReady
}

// until makes a Write wait until done returns true, or returns the error of blocked when that is not
// nil.
func (w *writing) until(done func() bool, blocked func() error) (err error) {
	w.attempt(&w.wr, func(sure bool) Events {
		if sure || !w.rd.op.held() { // otherwise a Read takes what comes from the peer
			w.progress(sure)
		}
		if done() {
			return 0
		}
		if err = blocked(); err != nil {
			return 0
		}
		if sure {
			w.checkStarved()
		}
		return w.writeWant()
	})
	return err
}

// writeBlocked returns why a Write that cannot go on must end, or nil. It reads the reason for the
// connection's end before the state: a Close or Abort of this end sets the state before it ends the
// connection, and takes precedence. So does a Close of the peer, after which a reset does not come from
// the peer's program.
func (w *writing) writeBlocked() error {
	err := w.over()
	st := w.wr.stopBits()
	if end := st &^ stShut; end != 0 || err == nil || errors.Is(err, syscall.EPIPE) && st != 0 {
		return stopError(st)
	}
	return err
}

// stopError returns why an operation has to end, or nil if the state has no reason.
func stopError(st uint32) error {
	switch {
	case st&stTaken != 0: // first, as a late call finds the session closed as well
		return ErrTaken
	case st&stClosed != 0:
		return ErrClosed
	case st&stInterrupted != 0:
		return ErrInterrupted
	case st&stPeerReset != 0:
		return errReset
	case st&stShut != 0:
		return ErrClosed
	case st&stPeerClosed != 0:
		return syscall.EPIPE
	}
	return nil
}

// outcome returns what a Write of size bytes returns that has taken n and ended with err. If ErrTaken
// has cut the Write in its middle, that is ErrCut. Otherwise it is as with TCP on Linux. A writer
// learns that the peer has closed in order by the reset that its bytes cause: so the first Write that a
// send buffer takes succeeds; its bytes are lost, and no position counts them. An error that breaks the
// connection is returned once, by Write or Read. Everything later is EPIPE.
func (w *writing) outcome(n, size int, err error) (int, error) {
	if err != nil && err != ErrTaken && w.wr.state.Load()&(stClosed|stInterrupted) == 0 {
		w.progress(true) // what the peer has sent is more exact than its endpoint's end
		err = cmp.Or(w.writeBlocked(), err)
	}
	switch {
	case err == ErrTaken && n > 0:
		w.writeCut = true
		return n, ErrCut
	case err == nil || err == ErrTaken || errors.Is(err, ErrClosed) || errors.Is(err, ErrInterrupted):
		return n, err
	}
	unaware := n == 0 && size <= w.cfg.SendBudget && w.unaware(err)
	switch {
	case unaware && size == 0:
		return 0, nil
	case w.told.Swap(true):
		return n, syscall.EPIPE
	case unaware:
		return size, nil
	}
	return n, err
}

// unaware reports whether err is only that the peer has closed in order, and this end has not found
// that yet.
func (w *writing) unaware(err error) bool {
	return errors.Is(err, syscall.EPIPE) && w.failure.Load() == nil && !w.told.Load()
}
