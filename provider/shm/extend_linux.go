package shm

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/session"
)

// How a link gets a further segment: if no slot is free, the dialing end makes its half of one and
// sends it. The accepting end maps that half, and replies with its own.

// extending holds this end's half of a segment while the peer has not replied. There is one at a time.
type extending struct {
	turn chan struct{} // holds a token while a segment is being added
	half atomic.Pointer[pendingHalf]
}

type pendingHalf struct {
	mapping
	reply chan uint8 // gets the code of the reply; holds one
}

// extend adds a segment to the link, unless another one was added since it had have slots.
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
	if l.listenerClosed.Load() { // or the peer has slots that this end does not have: see endExtending
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

// sendHalf sends this end's half of a segment and waits for the peer's. The caller has put a token into
// turn, which endExtending takes out.
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
		if l.extending.half.CompareAndSwap(p, nil) { // the peer has not received it
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

// segmentReplied handles the reply to a half that was sent. An error means that the peer broke the
// protocol.
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

// endExtending ends what sendHalf has begun. fds is the peer's half, or empty if its descriptor was
// lost.
func (l *link) endExtending(p *pendingHalf, code uint8, fds []int) (err error) {
	if code == codeOK {
		if err = l.join(p.mapping, fds); err != nil {
			// The peer has slots that this end does not have. So no segment can be added to this link,
			// and further connections need another link.
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

// handleSegment handles the peer's half of a new segment, and replies. A lack of descriptors or memory
// here must not end the existing connections.
func (l *link) handleSegment(m *message, fds []int, cut error) error {
	if cut == nil && len(fds) != 1 {
		return errors.New("a segment without its descriptor")
	}
	// A peer that reads no replies would cause descriptors of this process's user to pile up in flight,
	// of which the kernel allows a user at most RLIMIT_NOFILE.
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

// accommodate maps the peer's half of a new segment, and returns a descriptor of this end's half, which
// it makes.
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

// join maps the peer's half, whose descriptor is the first of fds, and installs the segment.
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

// install adds the segment's slots, and the bells if it is the first segment.
func (l *link) install(s segment) {
	if l.door.own == nil {
		l.door.own, l.door.peers = s.own.bell(), s.peers.bell()
	}
	l.slots.add(s, l.role == 0)
	l.door.seen.most.Store(int32(len(l.slots.list())))
}
