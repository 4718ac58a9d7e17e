package session

import "github.com/sanconn/san/session/internal/wire"

// The offering half of rendezvous: a Write whose bytes stay where they are until the peer has read them
// (D6). The other half is in fetch.go. Nothing of the stream is sent after an open offer until the
// offer is over.

// outOffer is the offer of the current Write.
type outOffer struct {
	state offerState
	id    uint32 // without an offer: of the last one
	total int    // bytes offered
	read  int    // bytes from the front that the peer has, once the offer is over
}

// offerState is how far an offer has come: none → open (sendOffer) → cancelled (cancel) → over
// (readByPeer) → none (end); or directly from open to over.
type offerState uint8

const (
	offerNone      offerState = iota
	offerOpen                 // the peer reads
	offerCancelled            // … and has to stop: CancelRead was sent
	offerOver                 // ReadDone came: the peer has stopped reading
)

const (
	// offerInline is how many bytes of an offered Write go in the message of the offer (D5): enough for
	// a protocol's header, so that the reader can start.
	offerInline = 1 << 10
	// minOffer is the least threshold in bytes, well above offerInline.
	minOffer = 2 * offerInline
)

// sendOffer offers the memory d, which follows the bytes first, if there is room for the message.
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

// cancel cancels the open offer before the peer has all of it (D12): the peer ends it by
// ReadDone.
func (t *sender) cancel(id uint32) {
	if o := &t.offer; o.id == id && o.state == offerOpen {
		o.state = offerCancelled
		t.queueControl(wire.Cancel(wire.TypeCancelRead, id))
	}
}

// end forgets the offer, which is over, and counts the bytes that the peer has of it, and the first
// bytes that went with its message. It returns the former.
func (o *outOffer) end(first int, stats *traffic) (read int) {
	read = o.read
	*o = outOffer{id: o.id}
	stats.offers++
	stats.directBytes += uint64(read)
	stats.bytes += uint64(first + read)
	return read
}

// readByPeer handles ReadDone.
func (o *outOffer) readByPeer(m wire.ReadDone, do *due) {
	if m.ID != o.id || o.state != offerOpen && o.state != offerCancelled { // it crossed this end's own end of that offer
		return
	}
	gone := m.Flags&wire.FlagGone != 0
	if m.Count > uint64(o.total) || m.Count < uint64(o.total) && o.state != offerCancelled && !gone {
		do.violation("a ReadDone for %d bytes of %d", m.Count, o.total)
		return
	}
	o.read, o.state, do.wake = int(m.Count), offerOver, true
}

// pays reports whether a large Write of p should be offered, for all of it, rather than copied. Without
// memory for a send buffer, each is offered. After a send buffer that could not be registered there is
// less reason to try.
func (w *writing) pays(p []byte) bool {
	_, rest := w.terms.toExpose(p)
	w.txMu.Lock()
	defer w.txMu.Unlock()
	if !w.terms.bufferMayPay {
		return true
	}
	if o := &w.tx.buffer; o.short && o.skip > 0 {
		o.skip-- // as in wantInbox, which is not called for an offered Write
		return true
	}
	pays, err := w.mem.PaysToOffer(rest)
	if err != nil {
		w.tx.stats.unregistered++
	}
	return pays
}

// writeOffered writes from the front of p by offers, as long as the rest is large enough and can be
// registered. If an offer ends short, or is not made, the rest of the Write meets the reason.
func (w *writing) writeOffered(p []byte, more bool) (n int) {
	for w.terms.large(len(p) - n) {
		k, whole := w.writeOffer(p[n:], more)
		n += k
		if !whole {
			w.progress(true) // if the peer has refused because it is closing, its Close comes next
			break
		}
	}
	return n
}

// writeOffer offers as much of p as one exposure takes, and waits until the peer has it. It returns how
// many bytes of p the peer has.
func (w *writing) writeOffer(p []byte, more bool) (n int, whole bool) {
	first, rest := w.terms.toExpose(p)
	desc, err := w.mem.Expose(rest, RemoteRead)
	if err != nil {
		if w.over() == nil {
			w.withSender(func(tx *sender) { tx.stats.unregistered++ })
		}
		return 0, false
	}
	defer w.mem.Revoke(desc)
	more = more || first+len(rest) < len(p)
	err = w.until(func() (sent bool) {
		if w.failure.Load() == nil {
			w.withSender(func(tx *sender) { sent = tx.sendOffer(p[:first], desc, more) })
		}
		return sent
	}, w.writeBlocked)
	if err != nil {
		return 0, false
	}
	if len(rest) > nearDone(w.terms.maxRDMA) {
		w.wr.slept.Store(true) // do not poll until NearDone
	}
	if err = w.until(w.offerOver, w.writeBlocked); err != nil {
		w.cancelOffer()
	}
	w.withSender(func(tx *sender) { n = tx.offer.end(first, &tx.stats) })
	return first + n, err == nil && n == len(rest)
}

func (w *writing) offerOver() bool {
	w.txMu.Lock()
	defer w.txMu.Unlock()
	return w.tx.offer.state == offerOver
}

// cancelOffer ends the open offer before the peer has all of it (D12). If the peer does not answer
// within CancelTimeout, the connection is aborted.
func (w *writing) cancelOffer() {
	if w.over() == nil {
		w.withSender(func(tx *sender) { tx.cancel(tx.offer.id) })
		defer w.killAfter(w.cfg.CancelTimeout, "the peer did not give up a transfer that was cancelled")()
		if w.until(w.offerOver, w.over) == nil {
			return
		}
	}
	if w.failure.Load() != nil { // otherwise revoking is enough, and what has arrived can still be read
		w.kill(errMidTransfer)
	}
}
