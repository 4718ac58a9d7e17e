package shm

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/session"
)

// The segments of a link after the first: the dialing end makes one when no slot is free,
// and offers it; the accepting end maps it, and replies.

// offers holds the segment on offer, of which there is one at a time: the next has to wait
// for the peer's reply.
type offers struct {
	turn chan struct{} // holds a token while a segment is on offer

	mu    sync.Mutex // guards what follows
	m     mapping
	reply chan uint8 // where the code of the reply goes; nil: none is on offer
}

func (o *offers) init() { o.turn = make(chan struct{}, 1) }

// begin puts a segment on offer. The caller has the turn.
func (o *offers) begin(m mapping) (reply chan uint8) {
	reply = make(chan uint8, 1)
	o.mu.Lock()
	defer o.mu.Unlock()
	o.m, o.reply = m, reply
	return reply
}

// end takes the segment off offer; a reply that is not nil restricts it to that offer. It
// returns false if there is no such offer.
func (o *offers) end(reply chan uint8) (m mapping, to chan uint8, ok bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.reply == nil || reply != nil && o.reply != reply {
		return m, nil, false
	}
	m, to = o.m, o.reply
	o.m, o.reply = mapping{}, nil
	return m, to, true
}

// extend adds a segment to the link.
func (l *link) extend(ctx context.Context) error {
	select {
	case l.offers.turn <- struct{}{}:
	case <-l.gone:
		return errLinkGone
	case <-ctx.Done():
		return unavailable(ctx.Err())
	}
	if l.slots.hasFree() {
		<-l.offers.turn
		return nil
	}
	have := len(l.slots.list())
	slots := nextSegment(have)
	if slots == 0 {
		<-l.offers.turn
		return &session.Unavailable{Reason: session.ReasonResources, Err: fmt.Errorf("shm: %d connections on one link", have)}
	}
	return l.offer(ctx, slots)
}

// offer sends a segment and waits for the peer's reply. The caller has the turn, which
// segmentReplied gives back.
func (l *link) offer(ctx context.Context, slots int) error {
	m, fd, err := newSegment(slots)
	if err != nil {
		<-l.offers.turn
		return &session.Unavailable{Reason: session.ReasonResources, Err: err}
	}
	defer unix.Close(fd)
	reply := l.offers.begin(m)
	if err := l.control.post(ctx, l.gone, &message{kind: msgSegment, number: uint32(slots)}, fd); err != nil {
		l.segmentReplied(reply, codeResources) // the peer has not got it
		return linkError(err)
	}
	select {
	case code := <-reply:
		if code != codeOK {
			return codeError(code)
		}
		return nil
	case <-l.gone:
		return errLinkGone
	case <-ctx.Done():
		return unavailable(ctx.Err()) // serve handles a later reply
	}
}

// segmentReplied ends an offer; see end for its argument. It returns false if there is no
// such offer.
func (l *link) segmentReplied(offer chan uint8, code uint8) bool {
	m, reply, ok := l.offers.end(offer)
	if !ok {
		return false
	}
	if code == codeOK {
		l.slots.add(m, true)
	} else {
		m.unmap()
	}
	reply <- code // never blocks: buffered
	<-l.offers.turn
	return true
}

// takeSegment maps a segment that the peer offers, and replies. If this process lacks a
// descriptor or room for it, existing connections must not suffer.
func (l *link) takeSegment(m *message, fds []int, cut error) error {
	if cut == nil && len(fds) != 1 {
		return errors.New("a segment without its descriptor")
	}
	code := uint8(codeResources)
	if cut == nil {
		mem, err := l.openSegment(fds[0], m.number)
		if errors.Is(err, errSegment) {
			return err
		}
		if err == nil {
			l.slots.add(mem, false)
			code = codeOK
		}
	}
	return l.reply(&message{kind: msgSegmentReply, code: code})
}

// openSegment checks and maps the next segment, which the peer has made.
func (l *link) openSegment(fd int, slots uint32) (mapping, error) {
	if slots == 0 || int64(slots) != int64(nextSegment(len(l.slots.list()))) {
		return mapping{}, fmt.Errorf("%w: %d slots", errSegment, slots)
	}
	if err := checkSegment(fd, int(slots)); err != nil {
		return mapping{}, err
	}
	return newMapping(fd, int(slots), l.payer)
}
