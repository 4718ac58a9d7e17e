package session

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sanconn/san/session/internal/wire"
)

// mostNotes bounds the notes of a peer that have come and were not handed over yet. The layer
// above has a few in the life of a session.
const mostNotes = 8

// notes are the peer's, on their way to Config.OnNote.
type notes struct {
	begun   atomic.Bool // Negotiate has succeeded: an end before is its result, and not reported
	starved atomic.Bool // a Write is, for which watchStarved looks, or was: it is reported once

	mu      sync.Mutex // guards what follows
	list    [][]byte   // oldest first
	over    bool       // the end is reported after them
	told    bool       // it was
	handing bool       // a goroutine hands them over
}

// starvedTime is for how long a Write waits for memory that others have used up before OnNote
// reports it. A peer that is only slow has taken something by then, and its stream goes on with less.
const starvedTime = time.Second

// noteStarved is called by a Write that is about to sleep. If it waits for memory that others have
// used up, OnNote reports that in time.
func (w *writing) noteStarved() {
	if w.starver != nil && w.cfg.OnNote != nil && !w.notes.starved.Load() && w.starves() && !w.notes.starved.Swap(true) {
		w.watchStarved()
	}
}

// watchStarved looks from time to time, while a Write starves, whether it has waited for starvedTime.
func (w *writing) watchStarved() {
	time.AfterFunc(starvedTime/2, func() {
		if !w.starves() {
			w.notes.starved.Store(false)
			if !w.starves() || w.notes.starved.Swap(true) {
				return // one that does from here on notes it
			}
		}
		if since := time.Duration(w.wr.since.Load()); since != 0 && time.Since(start)-since >= starvedTime {
			w.hand([]byte{})
		} else {
			w.watchStarved()
		}
	})
}

// starves reports whether a Write waits for memory that others have used up.
func (w *writing) starves() (is bool) {
	if w.wr.wants.Load() == 0 || !w.borrow() {
		return false
	}
	defer w.endBorrow()
	w.withSender(func(tx *sender) { is = tx.open() && w.starver.Starved() })
	return is
}

// SendNote sends the peer's layer above 1 to 240 bytes, which are not part of the stream.
// They go behind the notes, and the bytes of the stream, that have been taken before, but the
// peer gets them at once, whether or not it reads. It waits for nothing. It fails, and nothing
// was sent, once the connection is over, or this end has been closed.
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
	w.enlistPending() // it may have found no room
	return err
}

// WritePosition returns how many bytes of this end's stream have been taken so far: by Write,
// WriteBuffers and Commit.
func (w *writing) WritePosition() uint64 {
	w.txMu.Lock()
	defer w.txMu.Unlock()
	return w.tx.stats.bytes
}

// ReadPosition returns how many bytes of the peer's stream have been read so far: by Read,
// or by Discard. What CloseRead or Close has thrown away does not count.
func (r *reading) ReadPosition() uint64 {
	r.rxMu.Lock()
	defer r.rxMu.Unlock()
	return r.rx.stats.bytes
}

// noteLocked takes a Note message.
func (e *engine) noteLocked(m []byte) {
	rx := &e.rx
	note, err := wire.ParseNote(m)
	note = slices.Clone(note)
	if !rx.dropControl(wire.TypeNote, err) {
		return
	}
	if e.cfg.OnNote == nil || rx.end >= byClose || !e.hand(note) {
		rx.do.violation("a note of %d bytes, out of place", len(note))
	}
}

// hand hands a note to the layer above, in a goroutine: one at a time, in their order. It
// returns false if there are too many.
func (e *engine) hand(note []byte) bool {
	n := &e.notes
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.list) == mostNotes {
		return false
	}
	n.list = append(n.list, note)
	e.handLocked()
	return true
}

// noteEnd has OnNote report that the connection is over, behind the last note. It is
// called where no operation would find out, with any lock held.
func (e *engine) noteEnd() {
	if e.cfg.OnNote == nil || !e.notes.begun.Load() || !e.borrow() { // the endpoint may have been given back
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
		e.handLocked()
	}
}

// handLocked has a goroutine hand over what there is.
func (e *engine) handLocked() {
	n := &e.notes
	if n.handing || !e.borrow() { // as a loan, for which Close does not wait: OnNote may be waiting for that
		return
	}
	n.handing = true
	go func() {
		defer e.endBorrow()
		for e.handNext() {
		}
	}()
}

// handNext hands a note over, or the end. It returns false if there is nothing.
func (e *engine) handNext() bool {
	n := &e.notes
	n.mu.Lock()
	if n.over && !n.told && len(n.list) == 0 {
		n.mu.Unlock()
		for e.progress(true) >= progressMost { // the peer's last notes have come by now, and go before the end
		}
		n.mu.Lock()
	}
	var note []byte
	switch {
	case len(n.list) > 0:
		note = n.list[0]
		n.list = n.list[1:]
	case n.over && !n.told:
		n.told = true
	default:
		n.handing = false
		n.mu.Unlock()
		return false
	}
	n.mu.Unlock()
	e.cfg.OnNote(note)
	return true
}
