package shm

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/session"
)

// The segments of a link: the dialing end makes its half of a further one when no slot is free,
// and offers it; the accepting end maps that, and replies with its own.

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

// offer sends this end's half of a segment and waits for the peer's. The caller has the turn,
// which segmentReplied gives back.
func (l *link) offer(ctx context.Context, slots int) error {
	m, fd, err := l.newHalf(slots)
	if err != nil {
		<-l.offers.turn
		return &session.Unavailable{Reason: session.ReasonResources, Err: err}
	}
	defer unix.Close(fd)
	reply := l.offers.begin(m)
	if err := l.control.post(ctx, l.gone, &message{kind: msgSegment, number: uint32(slots)}, fd); err != nil {
		l.segmentReplied(reply, codeResources, nil) // the peer has not got it
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

// segmentReplied ends an offer; see end for its argument. fds are the peer's half, or nothing:
// descriptors may have been lost. An error means that the peer broke the protocol.
func (l *link) segmentReplied(offer chan uint8, code uint8, fds []int) error {
	m, reply, ok := l.offers.end(offer)
	if !ok {
		return errors.New("a reply without a segment")
	}
	var err error
	if code == codeOK {
		if err = l.join(m, fds); err != nil {
			// The peer has slots that this end has not. So no more can be added here, and
			// further connections take another link.
			code = codeResources
			l.listenerClosed.Store(true)
		}
	}
	if code != codeOK {
		m.unmap()
	}
	reply <- code // never blocks: buffered
	<-l.offers.turn
	if errors.Is(err, errSegment) {
		return err
	}
	return nil
}

// takeSegment takes a segment that the peer offers, and replies. If this process lacks a
// descriptor or room for it, existing connections must not suffer.
func (l *link) takeSegment(m *message, fds []int, cut error) error {
	if cut == nil && len(fds) != 1 {
		return errors.New("a segment without its descriptor")
	}
	reply := &message{kind: msgSegmentReply, code: codeResources}
	if cut != nil {
		return l.reply(reply)
	}
	half, err := l.accommodate(fds[0], m.number)
	switch {
	case errors.Is(err, errSegment):
		return err
	case err != nil:
		return l.reply(reply)
	}
	defer unix.Close(half)
	reply.code = codeOK
	return l.reply(reply, half)
}

// accommodate takes the next segment, whose half the peer has made, and returns that of this end
// for it.
func (l *link) accommodate(peers int, slots uint32) (half int, err error) {
	if slots == 0 || int64(slots) != int64(nextSegment(len(l.slots.list()))) {
		return -1, fmt.Errorf("%w: %d slots", errSegment, slots)
	}
	m, err := openHalf(peers, int(slots), l.payer)
	if err != nil {
		return -1, err
	}
	own, half, err := l.newHalf(int(slots))
	if err != nil {
		m.unmap()
		return -1, err
	}
	l.share(segment{own, m})
	return half, nil
}

// newHalf makes this end's half of a segment.
func (l *link) newHalf(slots int) (m mapping, fd int, err error) {
	return newHalf(slots, l.payer, !l.mayPunch)
}

// join adds the peer's half, which is the first descriptor, to this end's.
func (l *link) join(own mapping, fds []int) error {
	if len(fds) == 0 {
		return errCut
	}
	m, err := openHalf(fds[0], own.slots, l.payer)
	if err == nil {
		l.share(segment{own, m})
	}
	return err
}

// share puts the slots into use, and the first segment's bells.
func (l *link) share(s segment) {
	if l.door.own == nil {
		l.door.own, l.door.peers = s.own.bell(), s.peers.bell()
	}
	l.slots.add(s, l.side == 0)
	l.door.heard.most.Store(int32(len(l.slots.list())))
}
