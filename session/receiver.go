package session

import (
	"fmt"

	"github.com/sanconn/san/session/internal/credit"
	"github.com/sanconn/san/session/internal/wire"
)

// receiver is the peer's direction of the stream, put together in its order: messages stay in the
// endpoint until they are read, offered bytes are fetched (fetch.go), and the inbox's bytes are in the
// inbox (inbox.go). It neither locks nor waits. Session.rxMu guards it and the endpoint's receiving
// methods, and is held when a method is called. What is due afterwards is in do; see
// Session.settleLocked.
type receiver struct {
	msgs    Messages
	credits *credit.Counts

	ev    Event
	stage stage
	end   ending
	gone  bool // this end has closed: what comes is dropped, with FlagGone for the peer
	loan  loan
	cut   bool // the last message with payload was not the end of its Write

	open    bool // the last note came before the end of the stream
	byTaker bool // … which then is a cut for the program: see GiveBackRead

	kept  int   // messages in the endpoint's queue
	front front // the oldest of these
	fetch fetches
	inbox inbox

	polls uint64 // polls that took all that the endpoint had seen
	do    receiverDo
	stats traffic
}

// stage is how far the connection has come. It only grows: see reach.
type stage uint8

const (
	negotiating stage = iota // only Negotiate may poll
	running
	over   // the connection is over: what had come can still be read
	closed // the endpoint is closed, or about to be
)

func (p *stage) reach(next stage) { *p = max(*p, next) }

// ending is how the peer's stream has ended, after which nothing with a place in it may come. See
// receiver.endedByPeer.
type ending uint8

const (
	notYet     ending = iota
	byShutdown        // the peer still reads, and notes may come
	byClose           // or by Abort after Shutdown
	byAbort           // cut
)

// loan is whether the application has the front bytes.
type loan uint8

const (
	noLoan    loan = iota
	shared         // each Peek returns them
	exclusive      // no other Peek returns them
)

// receiverDo is what is due after a use of the receiver.
type receiverDo struct {
	due
	control []wire.Control // to be sent
	long    bool           // an event took as long as a whole look may take
	revoke  exposed        // access to be revoked, and memory to be given back
}

// count counts the events of a look.
func (do *receiverDo) count(events int) int {
	if do.long {
		do.long = false
		return progressMost
	}
	return events + 1
}

func (do *receiverDo) send(c wire.Control) { do.control = append(do.control, c) }

// front is the oldest kept message. Its bounds are read once, because on shared memory the peer can
// still change the message.
type front struct {
	msg   []byte // nil: not read yet
	off   int    // position in the message, header included; 0: not begun
	fill  int64  // bytes of the inbox after the message
	offer bool   // the rest of an offer comes after the message
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

// payload handles a message with a place in the stream: it keeps the message for Read, and starts with
// an offer.
func (rx *receiver) payload(h wire.Header, m []byte) {
	if rx.end != notYet || rx.fetch.open != nil {
		rx.do.violation("payload behind the end of the stream, or behind an open offer")
		return
	}
	switch h.Type {
	case wire.TypeData:
		rx.arrived(h, len(m) > wire.HeaderLen)
	case wire.TypeFill:
		n, ok := rx.inbox.fill(m)
		rx.stats.bufferedBytes += uint64(n)
		if !ok {
			return
		}
		rx.arrived(h, true)
		if rx.gone && rx.loan == noLoan { // otherwise the end of the loan does that
			rx.inbox.countRead(n)
		}
	default:
		if err := rx.fetch.offered(m); err != nil {
			rx.do.violation("%v", err)
		} else if rx.arrived(h, true); !rx.gone {
			rx.fetch.waiting.push(rx.fetch.open)
		}
	}
}

// arrived keeps a message of the stream, unless it will not be read.
func (rx *receiver) arrived(h wire.Header, bytes bool) {
	rx.cut = h.Flags&wire.FlagMore != 0
	if rx.gone || !bytes {
		rx.drop()
		return
	}
	rx.keep()
	rx.do.wake = true
}

// endedByPeer handles the end of the peer's stream. Unless t is Shutdown, the peer has closed as well.
func (rx *receiver) endedByPeer(t wire.Type) (ok bool) {
	if rx.end == byShutdown && t == wire.TypeShutdown || rx.end >= byClose || rx.fetch.open != nil {
		rx.do.violation("a message of type %d out of place", t)
		return false
	}
	switch {
	case t == wire.TypeShutdown:
		rx.end = byShutdown
	case t == wire.TypeAbort && rx.end == notYet:
		rx.end = byAbort
	default:
		rx.end = byClose
	}
	if rx.end >= byClose {
		rx.inbox.leftForGood()
	}
	rx.do.wake = true
	return true
}

// isNext reports whether the bytes of m, the message of the last Poll, are the next that Read takes.
// Nothing waits before them, so no offer is open.
func (rx *receiver) isNext(m []byte) bool {
	return len(m) > wire.HeaderLen && wire.TypeOf(m) == wire.TypeData && rx.end == notYet
}

// straight copies bytes of m, the message of the last Poll, to p, and returns how many.
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

// next returns the next bytes of the stream, as many as are in one piece; nil: there are none yet. They
// stay in place until advance.
func (rx *receiver) next() []byte {
	for {
		if t := rx.fetch.cur; t != nil {
			if b := t.unread(); b != nil {
				return b
			}
			if !t.consumed() {
				return nil
			}
			rx.fetch.cur = nil
		}
		if rx.kept == 0 {
			return nil
		}
		f := &rx.front
		if f.msg == nil && !rx.parseFront() {
			return nil
		}
		if f.fill > 0 {
			return rx.inbox.contiguous(f.fill)
		}
		if f.off < len(f.msg) {
			return f.msg[f.off:]
		}
		rx.releaseFront()
	}
}

// parseFront reads the bounds of the oldest kept message.
func (rx *receiver) parseFront() bool {
	f := &rx.front
	m := rx.msgs.Front()
	h, err := wire.ParseHeader(m)
	body := 0
	if err == nil {
		switch h.Type {
		case wire.TypeData:
			body = wire.HeaderLen
		case wire.TypeOfferRead:
			body, f.offer = wire.OfferReadLen, true
		case wire.TypeFill:
			n, err := wire.ParseFill(m)
			if err == nil && n > 0 && int64(n) <= rx.inbox.unread() {
				body, f.fill, f.off = wire.FillLen, int64(n), len(m)
			}
		}
	}
	if body == 0 || max(f.off, body) > len(m) || f.offer && rx.fetch.waiting.len() == 0 {
		rx.do.violation("a message changed after it was sent")
		return false
	}
	f.msg, f.off = m, max(f.off, body)
	return true
}

// advance ends the use of the first n bytes that next has returned.
func (rx *receiver) advance(n int) {
	f := &rx.front
	switch {
	case rx.fetch.cur != nil:
		rx.fetch.readOut(n)
		return
	case f.fill > 0:
		f.fill -= int64(n)
		if f.fill == 0 {
			rx.releaseFront()
		}
		rx.inbox.countRead(int64(n))
		return
	}
	if f.off += n; f.off == len(f.msg) {
		rx.releaseFront()
	}
}

// releaseFront releases the oldest kept message. Then the rest of its offer is read.
func (rx *receiver) releaseFront() {
	offer := rx.front.offer
	rx.front = front{}
	rx.kept--
	rx.msgs.Release()
	rx.credits.DealtWith()
	if offer {
		rx.fetch.cur, _ = rx.fetch.waiting.pop()
	}
}

// unread reports whether Read has not taken all of the stream that has come. The rest of an offer that
// is over and was read stays current until the next Read.
func (rx *receiver) unread() bool { return rx.kept > 0 || !rx.fetch.cur.consumed() }

// discard ensures that nothing more is kept, and releases what is unread, unless it is lent: then the
// end of the loan does.
func (rx *receiver) discard() {
	if rx.stage == closed || rx.gone {
		return
	}
	rx.gone = true
	if rx.loan == noLoan {
		rx.discardKept()
	}
	rx.advanceOffer()
}

func (rx *receiver) discardKept() {
	rx.front = front{}
	for ; rx.kept > 0; rx.kept-- {
		rx.msgs.Release()
		rx.credits.DealtWith()
	}
	rx.inbox.countRead(rx.inbox.unread())
	rx.fetch.forget(false)
}

// endLoan ends a loan: the first n bytes of it count as read.
func (rx *receiver) endLoan(n int) (err error) {
	if b := rx.next(); n < 0 || n > len(b) {
		err = fmt.Errorf("%w: %d of %d", ErrTooMuch, n, len(b))
	} else if n > 0 {
		rx.advance(n)
		rx.stats.bytes += uint64(n)
		rx.stats.loanBytes += uint64(n)
	}
	if rx.gone {
		rx.discardKept()
	}
	return err
}

// free gives back the memory of chunks and inbox, after the endpoint and all operations have ended.
func (rx *receiver) free() {
	rx.fetch.forget(true)
	if in := &rx.inbox; in.buf != nil {
		in.mem.Free(in.buf)
		in.exposed = exposed{}
	}
}
