package shm

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/session"
)

// The segments of a link: the dialing end makes its half of a further one when no slot is free,
// and offers it; the accepting end maps that, and replies with its own.

// offers holds the half of a segment that is on offer, of which there is one at a time: the next
// has to wait for the peer's reply.
type offers struct {
	turn chan struct{} // holds a token while there is one
	half atomic.Pointer[offer]
}

type offer struct {
	mapping
	reply chan uint8 // where the code of the reply goes; holds one
}

// extend adds a segment to the link, unless it has others than the have slots by its turn.
func (l *link) extend(ctx context.Context, have int) error {
	select {
	case l.offers.turn <- struct{}{}:
	case <-l.gone:
		return ErrLinkGone
	case <-ctx.Done():
		return unavailable(ctx.Err())
	}
	if len(l.slots.list()) != have {
		<-l.offers.turn
		return nil
	}
	slots := nextSegment(have)
	if slots == 0 {
		<-l.offers.turn
		return &session.Unavailable{Reason: session.ReasonResources, Err: fmt.Errorf("shm: %d connections on one link", have)}
	}
	return l.offer(ctx, slots)
}

// offer sends this end's half of a segment and waits for the peer's. The caller has the turn,
// which settle gives back.
func (l *link) offer(ctx context.Context, slots int) error {
	m, fd, err := newHalf(slots, l.payer, !l.mayPunch)
	if err != nil {
		<-l.offers.turn
		return unavailable(err)
	}
	defer unix.Close(fd)
	o := &offer{m, make(chan uint8, 1)}
	l.offers.half.Store(o)
	if err := l.control.post(ctx, &message{kind: msgSegment, number: uint32(slots)}, fd); err != nil {
		if l.offers.half.CompareAndSwap(o, nil) { // the peer has not got it
			l.settle(o, codeResources, nil)
		}
		return linkError(err)
	}
	select {
	case code := <-o.reply:
		return codeError(code)
	case <-l.gone:
		return ErrLinkGone
	case <-ctx.Done():
		return unavailable(ctx.Err()) // serve handles a later reply
	}
}

// segmentReplied takes the reply to the offer. An error means that the peer broke the protocol.
func (l *link) segmentReplied(code uint8, fds []int) error {
	o := l.offers.half.Swap(nil)
	if o == nil {
		return errors.New("a reply without a segment")
	}
	if err := l.settle(o, code, fds); errors.Is(err, errSegment) {
		return err
	}
	return nil
}

// settle ends an offer. fds are the peer's half, or nothing: descriptors may have been lost.
func (l *link) settle(o *offer, code uint8, fds []int) (err error) {
	if code == codeOK {
		if err = l.join(o.mapping, fds); err != nil {
			// The peer has slots that this end has not. So no more can be added here, and
			// further connections take another link.
			code = codeResources
			l.listenerClosed.Store(true)
		}
	}
	if code != codeOK {
		o.unmap()
	}
	o.reply <- code
	<-l.offers.turn
	return err
}

// takeSegment takes a segment that the peer offers, and replies. If this process lacks a
// descriptor or room for it, existing connections must not suffer.
func (l *link) takeSegment(m *message, fds []int, cut error) error {
	if cut == nil && len(fds) != 1 {
		return errors.New("a segment without its descriptor")
	}
	// A peer that reads no replies would have descriptors of this process's user pile up on their
	// way, of which the kernel lets a user have no more than RLIMIT_NOFILE.
	if err := l.control.awaitRead(); err != nil {
		return err
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
	m, err := openHalf(peers, int(slots), l.payer, !l.mayPunch)
	if err != nil {
		return -1, err
	}
	own, half, err := newHalf(int(slots), l.payer, !l.mayPunch)
	if err != nil {
		m.unmap()
		return -1, err
	}
	l.share(segment{own, m})
	return half, nil
}

// join adds the peer's half, which is the first descriptor, to this end's.
func (l *link) join(own mapping, fds []int) error {
	if len(fds) == 0 {
		return errCut
	}
	m, err := openHalf(fds[0], own.slots, l.payer, !l.mayPunch)
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
	l.slots.add(s, l.role == 0)
	l.door.seen.most.Store(int32(len(l.slots.list())))
}
