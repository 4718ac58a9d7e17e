package session

import (
	"errors"
	"fmt"
	"math"

	"github.com/sanconn/san/session/internal/wire"
)

// inOffer is the part of an offered Write that did not come with the offer's message.
type inOffer struct {
	id      uint32
	desc    Descriptor // where it is
	total   int
	asked   int // bytes, from the front, for which transfers were started
	got     int // … have completed
	reading int // RDMA reads in progress
	state   inOfferState
	noSlice bool // a Read's slice does not pay, or could not be registered: use only chunks
	chunks  []chunk
}

// inOfferState is how far the offer has come. It only grows; states that do not occur are skipped.
type inOfferState uint8

const (
	inOfferOpen    inOfferState = iota // transfers may be started
	inOfferNoMem                       // no further transfer: memory is lacking, and the offer is refused when no transfer is in progress
	inOfferRefused                     // Refuse was sent
	inOfferStopped                     // the peer has cancelled it
	inOfferOver                        // ReadDone was sent
)

// chunk is a part of an offer that is fetched ahead of any Read.
type chunk struct {
	buf  []byte // from Alloc
	n    int    // bytes of it that hold, or will hold, data
	r    int    // bytes already read
	full bool   // the transfer to it has completed
}

// maxOffer keeps lengths of offers within an int, whatever the peer's int is: 2⁴⁰-1 bytes, or 2³¹-1 if
// an int has 32 bits.
const maxOffer = math.MaxInt & (1<<40 - 1)

func newInOffer(m []byte) (*inOffer, error) {
	o, err := wire.ParseOfferRead(m)
	if err != nil {
		return nil, err
	}
	if n := o.Memory.Len; n == 0 || n > maxOffer {
		return nil, fmt.Errorf("an offer of %d bytes of memory", n)
	}
	return &inOffer{id: o.ID, desc: o.Memory, total: int(o.Memory.Len)}, nil
}

// unread returns the next bytes that were fetched ahead; nil: none, or there is no offer.
func (t *inOffer) unread() []byte {
	if t == nil || len(t.chunks) == 0 || !t.chunks[0].full {
		return nil
	}
	c := &t.chunks[0]
	return c.buf[c.r:c.n]
}

// consumed reports whether the offer is over and all of it was read, or there is none.
func (t *inOffer) consumed() bool { return t == nil || t.state == inOfferOver && len(t.chunks) == 0 }

// fits reports whether transfers of the offer go directly into a slice of room bytes.
func (t *inOffer) fits(room int) bool {
	return !t.noSlice && len(t.chunks) == 0 && (room >= directMin || room >= t.total-t.asked)
}

// toStart reports whether another transfer of the offer can be started.
func (t *inOffer) toStart() bool { return t.state == inOfferOpen && t.asked < t.total }

// offered handles a new offer.
func (f *fetches) offered(m []byte) (err error) {
	if f.bounds.caps&wire.CapRead == 0 {
		return errors.New("an offer, which this end has not announced to read")
	}
	f.open, err = newInOffer(m)
	return err
}

// endOffer ends the open offer if it is over, or cannot go on. short: the rest of it comes as payload,
// or its Write has ended in the middle.
func (f *fetches) endOffer(gone bool) (short bool) {
	t := f.open
	done := wire.ReadDone{ID: t.id, Count: uint64(t.got), From: t.desc}
	switch short = t.got < t.total; {
	case t.reading > 0:
		return false
	case short && gone:
		done.Flags = wire.FlagGone
	case short && t.state == inOfferNoMem:
		t.state = inOfferRefused
		f.do.send(wire.Cancel(wire.TypeRefuse, t.id))
		return false
	case short && t.state < inOfferStopped:
		return false
	}
	f.do.send(done.Control())
	f.stats.offers++
	f.do.wake = true
	t.state, f.open = inOfferOver, nil
	return short
}

// advanceOffer starts the transfers that can be started for the open offer, and ends the offer when it
// is over. It reports whether it has started any.
func (rx *receiver) advanceOffer() (started bool) {
	f := &rx.fetch
	if f.open == nil || rx.stage >= over || rx.do.fault != nil {
		return false
	}
	if !rx.gone {
		started = f.startReads(rx.isNextOffer(f.open))
	}
	if f.endOffer(rx.gone) {
		rx.cut = true
	}
	return started
}

// isNextOffer reports whether t is what Read takes next, except for the bytes that came with its
// message.
func (rx *receiver) isNextOffer(t *inOffer) bool {
	return t == rx.fetch.cur || rx.kept == 1 && rx.fetch.cur.consumed() && rx.loan == noLoan
}

// cancelledByPeer handles CancelRead: the offerer takes its memory back.
func (rx *receiver) cancelledByPeer(id uint32) {
	if t := rx.fetch.open; t != nil && t.id == id {
		t.state = inOfferStopped
		rx.advanceOffer()
	}
}
