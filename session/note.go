package session

import (
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sanconn/san/session/internal/wire"
)

// mostNotes bounds the notes of a peer that were not passed to OnNote yet. The layer above has a few in
// the life of a session.
const mostNotes = 8

// notes are the peer's notes for Config.OnNote.
type notes struct {
	begun      atomic.Bool // Negotiate has succeeded; an end before that is the result of Negotiate, and not reported
	starved    int64       // when OnNote was last told that a Write starves, since processStart; 0: never; guarded by wr.op
	looksAgain atomic.Bool // the timer of checkStarved is running

	mu        sync.Mutex // guards the fields below
	list      [][]byte   // oldest first
	over      bool       // the end is to be reported after the notes
	reported  bool       // the end was reported
	notifying bool       // a goroutine is calling OnNote
}

// starvedTime is how long a Write waits for memory that others have used up before OnNote reports it. A
// peer that is only slow has taken some bytes by then, and its stream goes on with less memory.
const starvedTime = time.Second

// checkStarved is called by a Write that is about to sleep. Whenever the Write has waited for
// starvedTime for memory that others have used up, OnNote is called to report it, and the Write looks
// again.
func (w *writing) checkStarved() {
	n := &w.notes
	starver, ok := w.provider.(Starver)
	if !ok || w.cfg.OnNote == nil {
		return
	}
	starves := false
	w.withSender(func(tx *sender) { starves = tx.writable() && starver.Starved() })
	if !starves {
		return
	}
	now, since := int64(time.Since(processStart)), w.wr.since.Load()
	if since != 0 && now-since >= int64(starvedTime) && (n.starved == 0 || now-n.starved >= int64(starvedTime)) {
		n.starved = now
		w.queueNote([]byte{})
	}
	if !n.looksAgain.Swap(true) {
		time.AfterFunc(starvedTime/2, func() {
			n.looksAgain.Store(false)
			w.wr.signalSleeper()
		})
	}
}

// Spare returns the endpoint's Spare, or the largest number if it is no Starver.
func (w *writing) Spare() int64 {
	if s, ok := w.provider.(Starver); ok {
		return s.Spare()
	}
	return math.MaxInt64
}

// SendNote sends 1 to 240 bytes to the layer above at the peer, which are not part of the stream. They
// follow earlier notes, and the bytes of the stream except those that wait in the send buffer. The peer
// gets them at once, whether or not it reads. SendNote does not block. It fails, and sends nothing, if
// the connection is over, or this end was closed.
func (w *writing) SendNote(note []byte) (err error) {
	if !w.borrow() { // the endpoint stays meanwhile
		return ErrClosed
	}
	defer w.endBorrow()
	if err := w.over(); err != nil {
		return err
	}
	w.withSender(func(tx *sender) {
		if tx.closed || tx.last.closes() {
			err = ErrClosed
			return
		}
		tx.queueControl(wire.Bytes(wire.TypeNote, slices.Clone(note)))
	})
	w.enlistPending() // the note may have found no room
	return err
}

// WritePosition returns how many bytes of this end's stream Write, WriteBuffers and Commit have taken
// so far.
func (w *writing) WritePosition() uint64 {
	w.txMu.Lock()
	defer w.txMu.Unlock()
	return w.tx.stats.bytes
}

// ReadPosition returns how many bytes of the peer's stream Read or Discard have taken so far. Bytes
// that Close has thrown away do not count.
func (r *reading) ReadPosition() uint64 {
	r.rxMu.Lock()
	defer r.rxMu.Unlock()
	return r.rx.stats.bytes
}

// noteLocked handles a Note message.
func (e *engine) noteLocked(m []byte) {
	rx := &e.rx
	note, err := wire.ParseNote(m)
	note = slices.Clone(note)
	if !rx.dropControl(wire.TypeNote, err) {
		return
	}
	rx.open = rx.end == notYet
	if e.cfg.OnNote == nil || rx.end >= byClose || !e.queueNote(note) {
		rx.do.violation("a note of %d bytes, out of place", len(note))
	}
}

// queueNote queues a note for OnNote, which a goroutine calls: one call at a time, in order. It returns
// false if there are too many notes.
func (e *engine) queueNote(note []byte) bool {
	n := &e.notes
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.list) == mostNotes {
		return false
	}
	n.list = append(n.list, note)
	e.notifyLocked()
	return true
}

// notifyEnd makes OnNote report that the connection is over, after the last note. It is called if no
// operation would find that out. Any lock may be held.
func (e *engine) notifyEnd() {
	if e.cfg.OnNote == nil || !e.notes.begun.Load() || !e.borrow() { // without the loan, the endpoint may be retired
		return
	}
	defer e.endBorrow()
	if e.over() == nil {
		return
	}
	n := &e.notes
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.over {
		n.over = true
		e.notifyLocked()
	}
}

// notifyLocked starts a goroutine that passes on what there is, unless one is running.
func (e *engine) notifyLocked() {
	n := &e.notes
	if n.notifying || !e.borrow() { // a loan, for which Close does not wait: OnNote may be waiting for Close
		return
	}
	n.notifying = true
	go func() {
		defer e.endBorrow()
		for e.notifyNext() {
		}
	}()
}

// notifyNext passes on a note, or the end. It returns false if there is nothing.
func (e *engine) notifyNext() bool {
	n := &e.notes
	n.mu.Lock()
	if n.over && !n.reported && len(n.list) == 0 {
		n.mu.Unlock()
		for e.progress(true) >= progressMost { // the peer's last notes have come by now, and must come before the end
		}
		n.mu.Lock()
	}
	var note []byte
	switch {
	case len(n.list) > 0:
		note = n.list[0]
		n.list = n.list[1:]
	case n.over && !n.reported:
		n.reported = true
	default:
		n.notifying = false
		n.mu.Unlock()
		return false
	}
	n.mu.Unlock()
	e.cfg.OnNote(note)
	return true
}
