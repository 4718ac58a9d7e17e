package session

import (
	"cmp"
	"fmt"

	"github.com/sanconn/san/session/internal/wire"
)

// The offering half of rendezvous: a Write whose bytes stay where they are until the peer
// has read them (D6). The other half is in fetch.go. Nothing of the stream follows an open
// offer until it is over.

// outOffer is the offer of the current Write.
type outOffer struct {
	state offerState
	id    uint32
	total int // bytes offered
	taken int // bytes that the peer has, from the front, once it is over
}

// offerState is what is with an offer: none (sendOffer) open (takeBack) cancelled
// (readByPeer) over (offerEnded) none; or from open straight to over.
type offerState uint8

const (
	offerNone      offerState = iota
	offerOpen                 // the peer reads
	offerCancelled            // … and was asked to stop: CancelRead was sent
	offerOver                 // ReadDone came: the peer reads no more
)

// unfinished reports whether it is the one with that id, which is not over.
func (o *outOffer) unfinished(id uint32) bool {
	return o.id == id && (o.state == offerOpen || o.state == offerCancelled)
}

const (
	// offerInline is how many bytes of an offered Write go with the offer itself
	// (D5): enough for a protocol's header, so that the reader can start.
	offerInline = 1 << 10
	// minOffer is the least threshold in bytes, well above the part that goes with the
	// offer.
	minOffer = 2 * offerInline
)

// plan decides how large Writes go, once both ends' abilities are known.
func (t *sender) plan(cfg *Config, lim *Limits, peerCaps uint32) {
	off := cfg.Disable
	from := cmp.Or(cfg.Threshold, lim.Threshold)
	if from > 0 && lim.MaxExpose > 0 && peerCaps&wire.CapRead != 0 && off&FeatureRDMARead == 0 {
		t.threshold = max(from, minOffer)
	}
	byWrite := lim.CanWrite && peerCaps&wire.CapInbox != 0 && off&FeatureRDMAWrite == 0
	if byWrite && lim.Inbox > 0 && boxSize(lim, cfg.SendBudget) > 0 {
		t.boxFrom, t.boxAfter = lim.Inbox, max(lim.InboxAfter, 1)
		t.boxMayPay = cfg.Threshold == 0
	}
}

// large reports whether n bytes of a Write are enough to be offered.
func (t *sender) large(n int) bool { return t.threshold > 0 && n >= t.threshold }

// pays reports whether memory to be exposed is to be offered rather than copied: where there
// is no memory for a box, all of it is.
func (t *sender) pays(b []byte) bool {
	if !t.boxMayPay || t.box.skip > 0 {
		return true
	}
	pays, err := t.mem.Pays(b)
	if err != nil {
		t.unregistered++
	}
	return pays
}

// offerFirst is how many bytes of an offered Write of n bytes go with the offer.
func (t *sender) offerFirst(n int) int {
	if first := min(offerInline, t.maxMsg-wire.OfferReadLen); first < n {
		return first
	}
	return 0
}

// sendOffer opens an offer of the memory d behind first, if there is room for its message.
func (t *sender) sendOffer(first []byte, d Descriptor, more bool) bool {
	if !t.open() || t.lent != nil {
		return false
	}
	if t.pending() {
		t.flush()
	}
	if t.box.unsent() > 0 {
		return false
	}
	n := wire.OfferReadLen + len(first)
	room := t.room(n-wire.HeaderLen, n-wire.HeaderLen)
	if room == nil {
		return false
	}
	t.lastID++
	wire.OfferRead{ID: t.lastID, Memory: d}.Put(room)
	copy(room[wire.OfferReadLen:], first)
	t.commit(room, wire.TypeOfferRead, wire.More(more), n)
	t.offer = outOffer{state: offerOpen, id: t.lastID, total: int(d.Len)}
	return true
}

// takeBack cancels the open offer before the peer has all of it (D12): the peer ends it by
// ReadDone.
func (t *sender) takeBack(id uint32) {
	if o := &t.offer; o.unfinished(id) && o.state == offerOpen {
		o.state = offerCancelled
		t.owe(wire.Cancel{Type: wire.TypeCancelRead, ID: id}.Control())
	}
}

// offerEnded forgets the offer, which is over, and counts the bytes that the peer has
// of it, and the first bytes that went with its message. It returns the former.
func (t *sender) offerEnded(first int) (taken int) {
	taken = t.offer.taken
	t.offer = outOffer{}
	t.offers++
	t.movedBytes += uint64(taken)
	t.bytes += uint64(first + taken)
	return taken
}

// readByPeer handles ReadDone.
func (t *sender) readByPeer(m wire.ReadDone) {
	o := &t.offer
	if !o.unfinished(m.ID) { // it crossed our own end of that offer
		return
	}
	gone := m.Flags&wire.FlagGone != 0
	if m.Count > uint64(o.total) || m.Count < uint64(o.total) && o.state != offerCancelled && !gone {
		t.violation(fmt.Errorf("a ReadDone for %d bytes of %d", m.Count, o.total))
		return
	}
	o.taken, o.state = int(m.Count), offerOver
	t.wake = true
}
