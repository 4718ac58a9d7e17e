package session

import (
	"errors"

	"github.com/sanconn/san/session/internal/wire"
)

// The offering half of rendezvous: a Write whose bytes stay where they are until the peer
// has read them (D6). The other half is in fetch.go. Nothing of the stream follows an open
// offer until it is over.

// outOffer is the offer of the current Write.
type outOffer struct {
	state offerState
	id    uint32 // none: of the one before
	total int    // bytes offered
	taken int    // bytes that the peer has, from the front, once it is over
}

// offerState is how far an offer has come: none → open (sendOffer) → cancelled (takeBack) → over
// (readByPeer) → none (end); or from open straight to over.
type offerState uint8

const (
	offerNone      offerState = iota
	offerOpen                 // the peer reads
	offerCancelled            // … and is to stop: CancelRead was sent
	offerOver                 // ReadDone came: the peer reads no more
)

const (
	// offerInline is how many bytes of an offered Write go with the offer itself
	// (D5): enough for a protocol's header, so that the reader can start.
	offerInline = 1 << 10
	// minOffer is the least threshold in bytes, well above the part that goes with the
	// offer.
	minOffer = 2 * offerInline
)

// sendOffer opens an offer of the memory d behind first, if there is room for its message.
func (t *sender) sendOffer(first []byte, d Descriptor, more bool) bool {
	if !t.mayWrite() || t.buffer.unsent() > 0 {
		return false
	}
	n := wire.OfferReadLen + len(first)
	room := t.room(n-wire.HeaderLen, n-wire.HeaderLen)
	if room == nil {
		return false
	}
	m := wire.OfferRead{ID: t.offer.id + 1, Memory: d}
	m.Put(room)
	copy(room[wire.OfferReadLen:], first)
	t.commitMessage(room, wire.TypeOfferRead, m.Flags()|wire.More(more), n)
	t.offer = outOffer{state: offerOpen, id: m.ID, total: int(d.Len)}
	return true
}

// takeBack cancels the open offer before the peer has all of it (D12): the peer ends it by
// ReadDone.
func (t *sender) takeBack(id uint32) {
	if o := &t.offer; o.id == id && o.state == offerOpen {
		o.state = offerCancelled
		t.queueControl(wire.Cancel(wire.TypeCancelRead, id))
	}
}

// end forgets the offer, which is over, and counts the bytes that the peer has of it, and the
// first bytes that went with its message. It returns the former.
func (o *outOffer) end(first int, stats *traffic) (taken int) {
	taken = o.taken
	*o = outOffer{id: o.id}
	stats.offers++
	stats.movedBytes += uint64(taken)
	stats.bytes += uint64(first + taken)
	return taken
}

// readByPeer handles ReadDone.
func (o *outOffer) readByPeer(m wire.ReadDone, do *due) {
	if m.ID != o.id || o.state != offerOpen && o.state != offerCancelled { // it crossed our own end of that offer
		return
	}
	gone := m.Flags&wire.FlagGone != 0
	if m.Count > uint64(o.total) || m.Count < uint64(o.total) && o.state != offerCancelled && !gone {
		do.violation("a ReadDone for %d bytes of %d", m.Count, o.total)
		return
	}
	o.taken, o.state, do.wake = int(m.Count), offerOver, true
}

// errNotTaken: memory could not be exposed here, or the peer could not reach it.
var errNotTaken = errors.New("memory cannot be registered for RDMA")

// pays reports whether a large Write of p is to be offered, for all of it, rather than copied:
// where there is no memory for a send buffer, each is. Behind one that could not be registered there is
// less reason to try.
func (w *writing) pays(p []byte) bool {
	_, rest := w.plan.toExpose(p)
	w.txMu.Lock()
	defer w.txMu.Unlock()
	if !w.plan.bufferMayPay {
		return true
	}
	if o := &w.tx.buffer; o.short && o.skip > 0 {
		o.skip-- // as in wantInbox, to which a Write that is offered does not come
		return true
	}
	pays, err := w.mem.PaysToOffer(rest)
	if err != nil {
		w.tx.stats.unregistered++
	}
	return pays
}

// writeOffered writes from the front of p by offers, as long as what is left is large
// enough and can be registered.
func (w *writing) writeOffered(p []byte, more bool) (n int, err error) {
	for w.plan.large(len(p) - n) {
		k, err := w.writeOffer(p[n:], more)
		n += k
		if err == errNotTaken {
			w.progress(true) // if the peer refuses because it closes, that comes next
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
func (w *writing) writeOffer(p []byte, more bool) (n int, err error) {
	first, rest := w.plan.toExpose(p)
	desc, err := w.mem.Expose(rest, RemoteRead)
	if err != nil {
		if w.over() == nil {
			w.withSender(func(tx *sender) { tx.stats.unregistered++ })
		}
		return 0, errNotTaken
	}
	defer w.mem.Revoke(desc)
	more = more || first+len(rest) < len(p)
	err = w.until(func() (sent bool) {
		if w.failure.Load() == nil {
			w.withSender(func(tx *sender) { sent = tx.sendOffer(p[:first], desc, more) })
		}
		return sent
	}, w.writeBlocked)
	if err == nil {
		if len(rest) > nearDone(w.plan.maxRDMA) {
			w.wr.slept.Store(true) // until NearDone
		}
		if err = w.until(w.offerOver, w.writeBlocked); err != nil {
			w.cancelOffer()
		}
		w.withSender(func(tx *sender) { n = tx.offer.end(first, &tx.stats) })
		if n < len(rest) && err == nil {
			if err = w.writeBlocked(); err == nil {
				err = errNotTaken
			}
		}
		n += first
	}
	return n, err
}

func (w *writing) offerOver() bool {
	w.txMu.Lock()
	defer w.txMu.Unlock()
	return w.tx.offer.state == offerOver
}

// cancelOffer ends the open offer before the peer has all of it (D12). If the peer does not
// answer within CancelTimeout, the connection is aborted.
func (w *writing) cancelOffer() {
	if w.over() == nil {
		w.withSender(func(tx *sender) { tx.takeBack(tx.offer.id) })
		defer w.killAfter(w.cfg.CancelTimeout, "the peer did not give up a transfer that was cancelled")()
		if w.until(w.offerOver, w.over) == nil {
			return
		}
	}
	if w.failure.Load() != nil { // otherwise to revoke is enough, and what has arrived can still be read
		w.kill(errMidTransfer)
	}
}
