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
// and sends it; the accepting end maps that, and replies with its own.

// extending holds the half of a segment that the peer has yet to reply to. There is one at a
// time: the next has to wait.
type extending struct {
	turn chan struct{} // holds a token while there is one
	half atomic.Pointer[pendingHalf]
}

type pendingHalf struct {
	mapping
	reply chan uint8 // where the code of the reply goes; holds one
}

// extend adds a segment to the link, unless it has others than the have slots by its turn.
func (l *link) extend(ctx context.Context, have int) error {
	select {
	case l.extending.turn <- struct{}{}:
	case <-l.gone:
		return ErrLinkGone
	case <-ctx.Done():
		return unavailable(ctx.Err())
	}
	if len(l.slots.list()) != have {
		<-l.extending.turn
		return nil
	}
	if l.listenerClosed.Load() { // or the peer has slots that this end has not: see endExtending
		<-l.extending.turn
		return ErrLinkGone
	}
	slots := nextSegment(have)
	if slots == 0 {
		<-l.extending.turn
		return &session.Unavailable{Reason: session.ReasonResources, Err: fmt.Errorf("shm: %d connections on one link", have)}
	}
	return l.sendHalf(ctx, slots)
}

// sendHalf sends this end's half of a segment and waits for the peer's. The caller has the turn,
// which endExtending gives back.
func (l *link) sendHalf(ctx context.Context, slots int) error {
	m, fd, err := newHalf(slots, l.payer, !l.mayPunch)
	if err != nil {
		<-l.extending.turn
		return unavailable(err)
	}
	defer unix.Close(fd)
	p := &pendingHalf{m, make(chan uint8, 1)}
	l.extending.half.Store(p)
	if err := l.control.post(ctx, &message{kind: msgSegment, number: uint32(slots)}, fd); err != nil {
		if l.extending.half.CompareAndSwap(p, nil) { // the peer has not got it
			l.endExtending(p, codeResources, nil)
		}
		return linkError(err)
	}
	select {
	case code := <-p.reply:
		return codeError(code)
	case <-l.gone:
		return ErrLinkGone
	case <-ctx.Done():
		return unavailable(ctx.Err()) // serve handles a later reply
	}
}

// segmentReplied takes the reply to the half that was sent. An error means that the peer broke the protocol.
func (l *link) segmentReplied(code uint8, fds []int) error {
	p := l.extending.half.Swap(nil)
	if p == nil {
		return errors.New("a reply without a segment")
	}
	if err := l.endExtending(p, code, fds); errors.Is(err, errSegment) {
		return err
	}
	return nil
}

// endExtending ends what extend has begun. fds are the peer's half, or nothing: descriptors may have
// been lost.
func (l *link) endExtending(p *pendingHalf, code uint8, fds []int) (err error) {
	if code == codeOK {
		if err = l.join(p.mapping, fds); err != nil {
			// The peer has slots that this end has not. So no more can be added here, and
			// further connections take another link.
			code = codeResources
			l.listenerClosed.Store(true)
		}
	}
	if code != codeOK {
		p.unmapKept(l.slots.memory, 0)
	}
	p.reply <- code
	<-l.extending.turn
	return err
}

// handleSegment takes a segment of which the peer has sent its half, and replies. If this process lacks a
// descriptor or room for it, existing connections must not suffer.
func (l *link) handleSegment(m *message, fds []int, cut error) error {
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
	m, err := mapHalf(peers, int(slots), l.payer, !l.mayPunch)
	if err != nil {
		return -1, err
	}
	own, half, err := newHalf(int(slots), l.payer, !l.mayPunch)
	if err != nil {
		m.unmap()
		return -1, err
	}
	l.install(segment{own, m})
	return half, nil
}

// join adds the peer's half, which is the first descriptor, to this end's.
func (l *link) join(own mapping, fds []int) error {
	if len(fds) == 0 {
		return errCut
	}
	m, err := mapHalf(fds[0], own.slots, l.payer, !l.mayPunch)
	if err == nil {
		l.install(segment{own, m})
	}
	return err
}

// install puts the slots into use, and the first segment's bells.
func (l *link) install(s segment) {
	if l.door.own == nil {
		l.door.own, l.door.peers = s.own.bell(), s.peers.bell()
	}
	l.slots.add(s, l.role == 0)
	l.door.seen.most.Store(int32(len(l.slots.list())))
}
