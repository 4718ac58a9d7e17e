package session

import (
	"math"
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
	begun      atomic.Bool // Negotiate has succeeded: an end before is its result, and not reported
	starved    int64       // when it was last reported that a Write was, after processStart; 0: never; guarded by wr.op
	looksAgain atomic.Bool // the timer of checkStarved runs

	mu        sync.Mutex // guards what follows
	list      [][]byte   // oldest first
	over      bool       // the end is reported after them
	reported  bool       // it was
	notifying bool       // a goroutine hands them over
}

// starvedTime is for how long a Write waits for memory that others have used up before OnNote
// reports it. A peer that is only slow has taken something by then, and its stream goes on with less.
const starvedTime = time.Second

// checkStarved is called by a Write that is about to sleep. It has OnNote report that the Write has
// waited for memory that others have used up, each time that it has for starvedTime, and the Write
// look again.
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

// Spare is that of the endpoint, if it is a Starver.
func (w *writing) Spare() int64 {
	if s, ok := w.provider.(Starver); ok {
		return s.Spare()
	}
	return math.MaxInt64
}

// SendNote sends the peer's layer above 1 to 240 bytes, which are not part of the stream.
// They go behind the notes that were taken before, and behind the bytes of the stream, but for
// what waits in the send buffer. The peer gets them at once, whether or not it reads. It waits for
// nothing. It fails, and nothing was sent, once the connection is over, or this end has been closed.
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
// or by Discard. What Close has thrown away does not count.
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
	rx.open = rx.end == notYet
	if e.cfg.OnNote == nil || rx.end >= byClose || !e.queueNote(note) {
		rx.do.violation("a note of %d bytes, out of place", len(note))
	}
}

// queueNote hands a note to the layer above, in a goroutine: one at a time, in their order. It
// returns false if there are too many.
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

// notifyEnd has OnNote report that the connection is over, behind the last note. It is
// called where no operation would find out, with any lock held.
func (e *engine) notifyEnd() {
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
		e.notifyLocked()
	}
}

// notifyLocked has a goroutine hand over what there is.
func (e *engine) notifyLocked() {
	n := &e.notes
	if n.notifying || !e.borrow() { // as a loan, for which Close does not wait: OnNote may be waiting for that
		return
	}
	n.notifying = true
	go func() {
		defer e.endBorrow()
		for e.notifyNext() {
		}
	}()
}

// notifyNext hands a note over, or the end. It returns false if there is nothing.
func (e *engine) notifyNext() bool {
	n := &e.notes
	n.mu.Lock()
	if n.over && !n.reported && len(n.list) == 0 {
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
