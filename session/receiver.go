package session

import (
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/sanconn/san/session/internal/credit"
	"github.com/sanconn/san/session/internal/wire"
)

// receiver is the peer's direction of the stream, put together in its order: messages stay
// in the endpoint until they are read, the tails of those that are offers are fetched
// (fetch.go), and the inbox's bytes lie in the inbox (inbox.go). It neither locks nor
// waits: Session.rxMu guards it and the endpoint's receiving methods, and is held when a
// method is called. What is to be done then is in do; see Session.settleLocked.
type receiver struct {
	msgs    Messages
	mem     Memory
	credits *credit.Counts
	lim     *Limits
	caps    uint32 // that were announced
	budget  int    // bytes that are fetched ahead of any Read

	ev    Event
	begun bool // negotiated: before that, Negotiate alone may poll
	gone  bool // the endpoint is closed, or being closed
	dead  bool // the connection is over: what had come is still read

	kept  int   // messages in the endpoint's queue
	front front // the oldest of them
	tails queue[*tail]
	cur   *tail // being read: its message has been released
	open  *tail // of the offer that is not over; the peer waits for it
	fetch fetches
	inbox inbox

	shut    bool // the peer's stream has ended; nothing with a place in it follows
	aborted bool // … by Abort
	mayNote bool // the stream has ended by Shutdown, and notes may still come
	closed  bool // the peer no longer reads
	cut     bool // the last message with payload was not the end of its Write
	discard bool // nobody will read, after CloseRead or Close
	leaving bool // … after Close, and the peer is to know
	lent    bool // the application reads the front bytes where they lie
	alone   bool // … and no other Peek returns them
	trickle int  // Reads left that pause first, as there is a stream of small messages

	want atomic.Int64 // len of the slice of a waiting Read; 0: none

	urgent   []byte
	urgentCh chan struct{}

	polls uint64 // polls that left nothing that the endpoint knew of
	do    receiverDo

	taken uint64 // messages about what this end sends

	bytes, messages, offers, movedBytes, boxedBytes, lentBytes, unregistered uint64
}

// receiverDo is what the receiver has found to be due.
type receiverDo struct {
	send  []wire.Control
	close inbox // its access is to be revoked, and its memory given back
	wake  bool  // a waiting Read has something to look at
	fault error // the peer has broken the protocol, or the device has failed
}

// front is the oldest kept message. Its bounds are read once: on shared memory the peer
// can still change the message.
type front struct {
	msg  []byte // nil: not looked at yet
	off  int    // position in it, header included; 0: not begun
	fill int64  // bytes of the inbox behind it
	tail bool   // an offer's tail is behind it
}

func (rx *receiver) send(c wire.Control) { rx.do.send = append(rx.do.send, c) }

// violation notes what the peer has done.
func (rx *receiver) violation(format string, args ...any) {
	if rx.do.fault == nil {
		rx.do.fault = brokeProtocol(fmt.Errorf(format, args...))
	}
}

// drop ends the use of the message of the last Poll.
func (rx *receiver) drop() {
	rx.msgs.Drop()
	rx.credits.DealtWith()
}

// keep leaves the message of the last Poll for Read.
func (rx *receiver) keep() {
	rx.msgs.Keep()
	rx.kept++
}

// payload handles a message with a place in the stream: it is kept for Read, and an offer
// is taken up.
func (rx *receiver) payload(h wire.Header, m []byte) {
	if rx.shut || rx.open != nil {
		rx.msgs.Drop()
		rx.violation("payload behind the end of the stream, or behind an open offer")
		return
	}
	switch h.Type {
	case wire.TypeData:
		rx.arrived(h, len(m) > wire.HeaderLen)
	case wire.TypeFill:
		if n, ok := rx.filled(m); !ok {
			rx.msgs.Drop()
		} else if rx.arrived(h, true); rx.discard && !rx.lent { // else when the loan ends
			rx.emptied(n)
		}
	default:
		rx.offered(h, m)
	}
}

// arrived keeps a message of the stream unless nobody will read it.
func (rx *receiver) arrived(h wire.Header, bytes bool) {
	rx.cut = h.Flags&wire.FlagMore != 0
	if rx.discard || !bytes {
		rx.drop()
		return
	}
	rx.keep()
	rx.do.wake = true
}

// offered takes up an offer.
func (rx *receiver) offered(h wire.Header, m []byte) {
	tl, err := newTail(m)
	if err == nil && rx.caps&wire.CapRead == 0 {
		err = errors.New("an offer, which this end has not announced to read")
	}
	if err != nil {
		rx.msgs.Drop()
		rx.violation("%v", err)
		return
	}
	rx.cut = h.Flags&wire.FlagMore != 0
	rx.open = tl
	if rx.discard {
		rx.drop()
		rx.advanceOffer()
		return
	}
	rx.tails.push(tl)
	rx.keep()
	rx.do.wake = true
}

// ended handles the end of the peer's stream; unless t is Shutdown, the peer has closed as
// well.
func (rx *receiver) ended(t wire.Type) (ok bool) {
	if rx.shut && t == wire.TypeShutdown || rx.closed || rx.open != nil {
		rx.violation("a message of type %d out of place", t)
		return false
	}
	if !rx.shut {
		rx.shut, rx.aborted = true, t == wire.TypeAbort
	}
	if t != wire.TypeShutdown {
		rx.closed = true
		rx.leftForGood()
	}
	rx.do.wake = true
	return true
}

// isNext reports whether the bytes of m, the message of the last Poll, are the next that
// Read takes, as nothing waits before them.
func (rx *receiver) isNext(m []byte) bool {
	return len(m) > wire.HeaderLen && wire.TypeOf(m) == wire.TypeData && !rx.shut && !rx.discard && rx.open == nil
}

// straight takes the bytes of m, the message of the last Poll, and returns how many it
// copied to p.
func (rx *receiver) straight(h wire.Header, m, p []byte) (n int) {
	rx.cut = h.Flags&wire.FlagMore != 0
	if n = copy(p, m[wire.HeaderLen:]); n == len(m)-wire.HeaderLen {
		rx.drop()
		return n
	}
	rx.keep()
	rx.front.off = wire.HeaderLen + n
	return n
}

// next returns the next bytes of the stream, as far as they lie in one piece; nil: there
// are none yet. They stay in place until advance.
func (rx *receiver) next() []byte {
	for {
		if t := rx.cur; t != nil {
			if b := t.unread(); b != nil {
				return b
			}
			if !t.read() {
				return nil
			}
			rx.cur = nil
		}
		if rx.kept == 0 {
			return nil
		}
		f := &rx.front
		if f.msg == nil && !rx.openFront() {
			return nil
		}
		if f.fill > 0 {
			return rx.inbox.next(f.fill)
		}
		if f.off < len(f.msg) {
			return f.msg[f.off:]
		}
		rx.releaseFront()
	}
}

// openFront reads the bounds of the oldest kept message.
func (rx *receiver) openFront() bool {
	f := &rx.front
	m := rx.msgs.Front()
	h, err := wire.ParseHeader(m)
	body := 0
	if err == nil {
		switch h.Type {
		case wire.TypeData:
			body = wire.HeaderLen
		case wire.TypeOfferRead:
			body, f.tail = wire.OfferReadLen, true
		case wire.TypeFill:
			fill, err := wire.ParseFill(m)
			if err == nil && fill.Length > 0 && int64(fill.Length) <= rx.inbox.unread() {
				body, f.fill, f.off = wire.FillLen, int64(fill.Length), len(m)
			}
		}
	}
	if body == 0 || max(f.off, body) > len(m) || f.tail && rx.tails.len() == 0 {
		rx.violation("a message changed after it was sent")
		return false
	}
	f.msg, f.off = m, max(f.off, body)
	return true
}

// advance ends the use of the first n bytes that next has returned.
func (rx *receiver) advance(n int) {
	f := &rx.front
	switch {
	case rx.cur != nil:
		if rx.cur.advance(n) {
			rx.freeChunk(rx.cur, 0)
		}
		return
	case f.fill > 0:
		f.fill -= int64(n)
		if f.fill == 0 {
			rx.releaseFront()
		}
		rx.emptied(int64(n))
		return
	}
	if f.off += n; f.off == len(f.msg) {
		rx.releaseFront()
	}
}

// releaseFront gives the oldest kept message's buffer back. The tail behind it is read
// next.
func (rx *receiver) releaseFront() {
	tail := rx.front.tail
	rx.front = front{}
	rx.kept--
	rx.msgs.Release()
	rx.credits.DealtWith()
	if tail {
		rx.cur, _ = rx.tails.pop()
	}
}

// unread reports whether Read has not taken all of the stream that has come. The tail
// of an offer that is over and all read stays current until the next Read.
func (rx *receiver) unread() bool { return rx.kept > 0 || rx.cur != nil && !rx.cur.read() }

// ready reports whether a Read finds something without another poll.
func (rx *receiver) ready() bool { return rx.kept > 0 || rx.cur != nil && rx.cur.unread() != nil }

// throwAway makes sure that nothing more is kept, and gives back what is unread, unless it
// is lent: then the end of the loan does.
func (rx *receiver) throwAway() {
	if rx.gone || rx.discard {
		return
	}
	rx.discard = true
	if !rx.lent {
		rx.throw()
	}
	rx.advanceOffer()
}

func (rx *receiver) throw() {
	rx.front = front{}
	for ; rx.kept > 0; rx.kept-- {
		rx.msgs.Release()
		rx.credits.DealtWith()
	}
	rx.emptied(rx.inbox.unread())
	for t, ok := rx.tails.pop(); ok; t, ok = rx.tails.pop() {
		rx.freeFull(t)
	}
	if rx.cur != nil {
		rx.freeFull(rx.cur)
		rx.cur = nil
	}
}

// unlend ends a loan: the first n bytes of it count as read.
func (rx *receiver) unlend(n int) (err error) {
	if b := rx.next(); n < 0 || n > len(b) {
		err = fmt.Errorf("%w: %d of %d", ErrTooMuch, n, len(b))
	} else if n > 0 {
		rx.advance(n)
		rx.bytes += uint64(n)
		rx.lentBytes += uint64(n)
	}
	if rx.discard {
		rx.throw()
	}
	return err
}

// freeFull frees the chunks of t that no transfer goes to.
func (rx *receiver) freeFull(t *tail) {
	for len(t.chunks) > 0 && t.chunks[0].full {
		rx.freeChunk(t, 0)
	}
}

// free gives back the memory of chunks, after the endpoint and all operations have ended.
func (rx *receiver) free() {
	all := []*tail{rx.open, rx.cur}
	for t, ok := rx.tails.pop(); ok; t, ok = rx.tails.pop() {
		all = append(all, t)
	}
	for _, t := range all {
		for t != nil && len(t.chunks) > 0 {
			rx.freeChunk(t, 0)
		}
	}
	rx.open, rx.cur = nil, nil
	if buf := rx.inbox.buf; buf != nil {
		rx.inbox = inbox{}
		rx.mem.Free(buf)
	}
}
