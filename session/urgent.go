package session

import (
	"fmt"
	"syscall"

	"github.com/sanconn/san/session/internal/wire"
)

// MaxUrgent is the largest WriteUrgent in bytes.
const MaxUrgent = 64

var errUrgentSize = fmt.Errorf("session: urgent data must have 1 to %d bytes: %w", MaxUrgent, syscall.EMSGSIZE)

// WriteUrgent sends 1 to MaxUrgent bytes out of band (D10); for any other length it fails with
// EMSGSIZE. The bytes overtake waiting data and replace urgent data that the peer has not read yet.
// WriteUrgent waits while data and an earlier WriteUrgent are blocked; InterruptWrite ends the wait.
func (w *writing) WriteUrgent(p []byte) (n int, err error) {
	if len(p) == 0 || len(p) > MaxUrgent {
		return 0, errUrgentSize
	}
	w.ur.begin()
	defer w.ur.op.Unlock()
	w.attempt(&w.ur, func(sure bool) Events {
		w.progress(sure)
		if st := w.wr.state.Load(); st != 0 {
			err = stopError(st)
			return 0
		}
		if w.failure.Load() == nil {
			sent := false
			w.withSender(func(tx *sender) { sent = tx.urgentMessage(p) })
			if sent {
				n = len(p)
				return 0
			}
		}
		if err = w.writeBlocked(); err != nil {
			return 0
		}
		return RecvReady | SendReady
	})
	return w.outcome(n, len(p), err)
}

// urgentLocked handles an Urgent message.
func (e *engine) urgentLocked(m []byte) {
	rx := &e.rx
	payload := m[wire.HeaderLen:]
	if len(payload) == 0 {
		rx.do.violation("urgent data of no bytes")
		return
	}
	e.urgent = append(e.urgent[:0], payload[:min(len(payload), MaxUrgent)]...)
	rx.dropControl(wire.TypeUrgent, nil)
	select {
	case e.urgentCame <- struct{}{}:
	default:
	}
}

// ReadUrgent takes the newest urgent data if it was not read yet: at most len(p) bytes; the rest is
// discarded. It does not block. If there is none it returns ErrNoUrgent.
func (r *reading) ReadUrgent(p []byte) (int, error) {
	r.progress(true)
	r.rxMu.Lock()
	defer r.rxMu.Unlock()
	if len(r.urgent) == 0 {
		return 0, ErrNoUrgent
	}
	n := copy(p, r.urgent)
	r.urgent = r.urgent[:0]
	return n, nil
}

// Urgent returns a channel that holds a token when urgent data has come.
func (r *reading) Urgent() <-chan struct{} { return r.urgentCame }
