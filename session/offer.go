package session

import (
	"fmt"

	"github.com/sanconn/san/session/internal/wire"
)

// The offering half of rendezvous: a Write whose bytes stay where they are until the peer
// has fetched them (D6), or has granted memory to write them to (D7). The other half is in
// fetch.go. Nothing of the stream follows an open offer until it is over.

// outOffer is the offer of the current Write.
type outOffer struct {
	active bool
	id     uint32
	total  int // bytes offered
	taken  int // bytes that the peer has, from the front
	over   bool

	cancelled bool // by RDMA read: CancelRead was sent

	// by RDMA write
	grant   Descriptor // memory that the peer granted
	granted bool
	refused bool // the peer wants the rest as payload
	stop    bool // the peer wants its memory back
	posted  int  // of the grant, bytes in RDMA writes started
	written int  // of the grant, bytes completed
	failed  int  // of the grant, bytes of RDMA writes that have failed
}

func (o *outOffer) is(id uint32) bool { return o.active && o.id == id }

// settled reports whether no RDMA write of this end is under way.
func (o *outOffer) settled() bool { return o.posted == o.written+o.failed }

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
	t.byRead = lim.MaxExpose > 0 && peerCaps&wire.CapRead != 0 && off&FeatureRDMARead == 0
	byWrite := lim.CanWrite && peerCaps&wire.CapGrant != 0 && off&FeatureRDMAWrite == 0
	from := cfg.Threshold
	if from == 0 {
		from = lim.Threshold
	}
	if from > 0 && (t.byRead || byWrite) {
		t.threshold = max(from, minOffer)
	}
	if byWrite && lim.Inbox > 0 && t.boxBudget >= lim.Inbox {
		t.boxFrom, t.boxAfter = lim.Inbox, lim.InboxAfter
		t.boxMayPay = cfg.Threshold == 0
	}
}

// toOffer reports whether n bytes of a Write are to be offered.
func (t *sender) toOffer(n int) bool {
	return t.threshold > 0 && n >= t.threshold && (!t.boxMayPay || n >= t.mem.OfferFrom())
}

// offerFirst is how many bytes of an offered Write of n bytes go with the offer.
func (t *sender) offerFirst(n int) int {
	if first := min(offerInline, t.maxMsg-wire.OfferReadLen); first < n {
		return first
	}
	return 0
}

// sendOffer opens an offer of total bytes behind first, if there is room for its message.
func (t *sender) sendOffer(first []byte, d Descriptor, total int, more bool) bool {
	if !t.open() || t.lent != nil {
		return false
	}
	if t.pending() {
		t.flush()
	}
	if t.box.unsent() > 0 {
		return false
	}
	typ, n := wire.TypeOfferWrite, wire.OfferWriteLen
	if t.byRead {
		typ, n = wire.TypeOfferRead, wire.OfferReadLen
	}
	n += len(first)
	room := t.room(n-wire.HeaderLen, n-wire.HeaderLen)
	if room == nil {
		return false
	}
	id := t.newID()
	if t.byRead {
		wire.OfferRead{ID: id, Memory: d}.Put(room)
	} else {
		wire.OfferWrite{ID: id, Length: uint64(total)}.Put(room)
	}
	copy(room[n-len(first):], first)
	t.commit(room, typ, wire.More(more), n)
	t.offer = outOffer{active: true, id: id, total: total}
	return true
}

func (t *sender) newID() uint32 {
	if t.nextID++; t.nextID == boxID {
		t.nextID++
	}
	return t.nextID
}

// driveOffer does what the open offer of tail needs from this end: nothing where the peer
// reads; where it granted memory, RDMA writes.
func (t *sender) driveOffer(tail []byte) (over bool) {
	o := &t.offer
	if o.over {
		return true
	}
	if t.gone || !o.granted {
		return false
	}
	size := int(o.grant.Len)
	for !o.stop && !o.refused && o.posted < size {
		n := min(size-o.posted, t.maxRDMA)
		err := t.mem.Write(tail[o.taken+o.posted:][:n], o.grant, o.posted, o.id)
		if err == ErrWouldBlock {
			return false
		}
		if err != nil {
			o.refused = true // our memory cannot be registered: the rest goes as payload
			break
		}
		t.writes.push(n)
		o.posted += n
	}
	if o.written < o.posted {
		return false
	}
	t.giveGrantBack()
	return o.over
}

// giveGrantBack ends the use of a grant that is used up, or that the peer wants back.
func (t *sender) giveGrantBack() {
	o := &t.offer
	done := wire.Done{Type: wire.TypeWriteDone, ID: o.id, Count: uint64(o.written)}
	o.taken += o.written
	o.granted, o.over = false, o.taken == o.total || o.refused
	if o.over {
		done.Flags = wire.FlagLast
	}
	o.posted, o.written, o.stop = 0, 0, false
	t.owe(done.Control())
}

// withdraw begins to end the open offer before the peer has all of it (D12): it is over
// once driveOffer returns true.
func (t *sender) withdraw() {
	switch o := &t.offer; {
	case o.over:
	case t.byRead:
		t.takeBack(o.id)
	case o.granted:
		o.stop, o.refused = true, true
	default:
		o.over = true
		t.owe(wire.Done{Type: wire.TypeWriteDone, Flags: wire.FlagLast, ID: o.id}.Control())
	}
}

// takeBack cancels the open offer: the peer ends it by ReadDone.
func (t *sender) takeBack(id uint32) {
	if o := &t.offer; o.is(id) && t.byRead && !o.over && !o.cancelled {
		o.cancelled = true
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
func (t *sender) readByPeer(m wire.Done) {
	o := &t.offer
	if !o.is(m.ID) || !t.byRead || o.over { // it crossed our own end of that offer
		return
	}
	gone := m.Flags&wire.FlagGone != 0
	if m.Count > uint64(o.total) || m.Count < uint64(o.total) && !o.cancelled && !gone {
		t.violation(fmt.Errorf("a ReadDone for %d bytes of %d", m.Count, o.total))
		return
	}
	o.taken, o.over = int(m.Count), true
	t.wake = true
}

// grantedByPeer handles Grant.
func (t *sender) grantedByPeer(m wire.Grant) {
	o := &t.offer
	if !o.is(m.ID) || o.over {
		return
	}
	d := m.Memory
	if t.byRead || o.granted || d.Len > uint64(o.total-o.taken) {
		t.violation(fmt.Errorf("a grant of %d bytes for an offer of %d", d.Len, o.total-o.taken))
		return
	}
	t.wake = true
	taken, gone := m.Flags&wire.FlagTaken != 0, m.Flags&wire.FlagGone != 0
	if d.Len == 0 && (taken || gone) {
		if taken {
			o.taken = o.total
		}
		o.over = true
		return
	}
	o.grant, o.granted = d, true
	o.refused = o.refused || d.Len == 0
}

// cancelledByPeer handles CancelWrite: the granter wants its memory back.
func (t *sender) cancelledByPeer(id uint32) {
	if o := &t.offer; o.is(id) && o.granted {
		o.stop = true
		t.wake = true
	}
}
