package session

import (
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// receiver holds what has come from the peer: a queue of messages that stay in
// the endpoint until they are read, and the tails of those that are offers.
type receiver struct {
	mu sync.Mutex // guards all below and the endpoint's receiving methods
	ev Event

	begun bool // negotiated: before that, Negotiate alone may poll

	kept int // messages in the endpoint's queue
	off  int // position in the front one, header included; 0: not begun

	tails []*tail // of the offers in that queue, in order
	cur   *tail   // being read: its message has been released
	open  *tail   // of the offer that is not over; the peer waits for it
	fetch fetches
	inbox inbox

	shut    bool // the peer's stream has ended; nothing with a place in it follows
	aborted bool // … by Abort
	closed  bool // the peer no longer reads
	cut     bool // the last message with payload said that its Write goes on
	discard bool // nobody will read, after CloseRead or Close
	leaving bool // … after Close, and the peer is to know
	trickle bool // the last Read took several small messages: there is a stream of them

	looks uint64 // polls that left nothing that the endpoint knew of
	heavy int    // extra weight of the event being handled (lookMost)

	want atomic.Int64 // len of the slice of a waiting Read; 0: none

	urgent   []byte
	urgentCh chan struct{}

	bytes, messages, offers, offerBytes uint64
}

// Read reads up to len(p) bytes. It blocks until there is at least one, the
// end of the stream (io.EOF), or an error: ErrClosed, ErrInterrupted,
// syscall.ECONNRESET if the peer vanished or reset the connection (after
// everything that had arrived), ETIMEDOUT if it stopped answering.
func (s *Session) Read(p []byte) (int, error) {
	s.rd.op.Lock()
	n, err := s.read(p)
	s.leftBehind()
	s.rd.op.Unlock()
	return n, err
}

// read is Read, for the holder of rd.op.
func (s *Session) read(p []byte) (n int, err error) {
	if st := s.rd.state.Load(); st != 0 {
		return 0, s.readState(st)
	}
	if s.idle.away.Load() {
		s.idle.join(s)
	}
	trickle := s.rx.trickle // written by Reads alone
	if n, err = s.receive(p); n > 0 || err != nil || len(p) == 0 {
		return n, err
	}
	return s.readWaiting(p, trickle)
}

// A Read that has drained a stream of small messages pauses before it looks again:
// looking at once would take the ring's cache line from the writer for a single
// message. The microsecond doubles the rate.
const (
	paceBelow = 1 << 10 // bytes per message on average
	paceFor   = 1500 * time.Nanosecond
)

func (s *Session) readState(st uint32) error {
	switch {
	case st&stClosed != 0:
		return ErrClosed
	case st&stInterrupted != 0:
		return ErrInterrupted
	}
	return io.EOF
}

func (s *Session) readWaiting(p []byte, trickle bool) (n int, err error) {
	var w waiter
	s.rx.want.Store(int64(len(p)))
	if trickle && s.cfg.Spin > 0 {
		procyield(s.pace.drain)
	}
	for {
		s.pause(&w, &s.rd, s.readEvents())
		if n, err = s.receive(p); n > 0 || err != nil {
			break
		}
		var broken bool
		if n, broken = s.brokenDirect(); n > 0 {
			break
		} else if broken {
			continue
		}
		if st := s.rd.state.Load(); st != 0 {
			n = s.stopDirect(&w)
			if n == 0 {
				err = s.readState(st)
			}
			break
		}
	}
	s.rx.want.Store(0)
	s.doneWaiting(&w, &s.rd)
	return n, err
}

// readEvents are what a Read waits for: also room, if something of ours needs it.
func (s *Session) readEvents() Events {
	if s.rx.fetch.full.Load() || s.tx.waiting.Load() {
		return RecvReady | SendReady
	}
	return RecvReady
}

// receive copies to p what is there, polling for more; (0, nil): nothing yet.
func (s *Session) receive(p []byte) (int, error) {
	s.rx.mu.Lock()
	n, err := s.receiveLocked(p)
	s.rx.mu.Unlock()
	return n, err
}

func (s *Session) receiveLocked(p []byte) (n int, err error) {
	rx := &s.rx
	switch {
	case s.gone && rx.fetch.into == nil:
		return 0, s.streamEnd()
	case s.gone:
		return 0, nil // see brokenDirect
	case rx.fetch.into != nil:
		s.poll()
		n, err = s.directDone()
		s.serviceTx()
		return n, err
	}
	before, events := rx.messages, 0
	for n < len(p) {
		if events >= lookMost {
			s.lookAgain()
			break
		}
		failed := s.failure.Load() != nil // still deliver what had come
		if rx.cur != nil {
			k := s.takeTail(p[n:])
			if n += k; k > 0 || rx.cur == nil {
				continue
			}
			if failed {
				break
			}
			s.offerSlice(p, n)
			events += s.poll()
			if rx.fetch.into != nil {
				n, err = s.directDone()
				s.serviceTx()
				return n, err
			}
			if k = s.takeTail(p[n:]); k == 0 && rx.cur != nil {
				break // a transfer is under way
			}
			n += k
		} else if rx.kept > 0 {
			k, ok := s.takeFront(p[n:])
			if n += k; !ok {
				break
			}
		} else if !failed && s.ep.Poll(&rx.ev) {
			n += s.takeEvent(p[n:])
			events += s.weight()
			if rx.ev.Last && n > 0 {
				rx.looks++
				break
			}
		} else {
			rx.looks++
			break
		}
	}
	if n == 0 && len(p) > 0 {
		err = s.streamEnd()
	}
	rx.bytes += uint64(n)
	took := rx.messages - before
	rx.trickle = took > 1 && uint64(n) < paceBelow*took
	s.serviceTx()
	return n, err
}

// takeEvent handles the event of the last Poll; its payload goes straight to p, as
// nothing waits before it.
func (s *Session) takeEvent(p []byte) int {
	rx := &s.rx
	m := rx.ev.Msg
	if rx.ev.Kind != Message || len(m) <= headerLen || msgType(m[0]) != msgData || rx.shut || rx.discard || rx.open != nil {
		s.handle(&rx.ev)
		return 0
	}
	s.counted(m)
	rx.cut = m[1]&flagMore != 0
	n := copy(p, m[headerLen:])
	if n == len(m)-headerLen {
		s.drop()
		return n
	}
	s.keep()
	rx.off = headerLen + n
	return n
}

// takeFront copies from the oldest kept message, and checks its content again, as the
// peer can still change it on shared memory.
func (s *Session) takeFront(p []byte) (n int, ok bool) {
	rx := &s.rx
	m := s.ep.Front()
	if len(m) >= headerLen && msgType(m[0]) == msgFill {
		return s.takeFill(p, m)
	}
	body := 0
	if len(m) >= headerLen {
		switch msgType(m[0]) {
		case msgData:
			body = headerLen
		case msgOfferRead:
			body = offerReadLen
		case msgOfferWrite:
			body = offerWriteLen
		}
	}
	if body == 0 || max(rx.off, body) > len(m) || body != headerLen && len(rx.tails) == 0 {
		s.violation("a message changed after it was sent")
		return 0, false
	}
	rx.off = max(rx.off, body)
	n = copy(p, m[rx.off:])
	if rx.off += n; rx.off < len(m) {
		return n, true
	}
	rx.off = 0
	s.release()
	if body != headerLen {
		rx.cur = rx.tails[0]
		rx.tails[0] = nil
		rx.tails = rx.tails[1:]
	}
	return n, true
}

// release gives the oldest kept message's buffer back.
func (s *Session) release() {
	s.rx.kept--
	s.ep.Release()
	s.dealtWith()
}

// unread reports whether Read has not taken all of the stream that has come. The tail
// of an offer that is over and all read stays current until the next Read.
func (rx *receiver) unread() bool {
	return rx.kept > 0 || rx.cur != nil && !(rx.cur.over && len(rx.cur.chunks) == 0)
}

// ready reports whether a Read finds something without another poll.
func (rx *receiver) ready() bool {
	return rx.kept > 0 || rx.cur != nil && len(rx.cur.chunks) > 0 && rx.cur.chunks[0].full
}

var errReset = fmt.Errorf("session: the peer reset the connection: %w", syscall.ECONNRESET)

// streamEnd says why nothing more can be read; nil if more may come.
func (s *Session) streamEnd() error {
	rx := &s.rx
	if p := s.failure.Load(); p != nil && !(rx.shut && !rx.unread()) {
		return *p
	}
	pending := rx.unread()
	switch {
	case pending:
	case rx.aborted:
		return errReset
	case rx.shut:
		return io.EOF
	}
	if s.gone {
		return ErrClosed
	}
	if rx.ready() { // it came in the poll that ended a transfer of no bytes
		s.rd.signal() // look again
		return nil
	}
	err := s.ep.Err()
	if err == nil {
		return nil
	}
	if s.ep.Poll(&rx.ev) { // it came between the last Poll and the end
		s.handle(&rx.ev)
		s.rd.signal()
		return nil
	}
	switch {
	case errors.Is(err, io.EOF) && !rx.cut && !pending:
		return io.EOF
	case errors.Is(err, io.EOF):
		return fmt.Errorf("session: the peer's process ended in the middle of a write: %w", syscall.ECONNRESET)
	case errors.Is(err, syscall.EPIPE):
		return fmt.Errorf("session: the peer left without a word: %w", syscall.ECONNRESET)
	}
	return err
}

// poll handles all events that are there, up to lookMost, and starts the transfers
// that are due; with some providers these complete at once. It returns the weight of
// the events. Before negotiation it does nothing: a spurious Wake must not take the
// negotiation message from Negotiate.
func (s *Session) poll() (events int) {
	rx := &s.rx
	if !rx.begun {
		return 0
	}
	rx.looks++
	for again := true; again; again = s.pump() {
		for !s.gone && s.failure.Load() == nil && s.ep.Poll(&rx.ev) {
			s.handle(&rx.ev)
			if events += s.weight(); events >= lookMost {
				s.lookAgain()
				return events
			}
		}
	}
	return events
}

// weight is how many events the last one counts as.
func (s *Session) weight() int {
	w := 1 + s.rx.heavy
	s.rx.heavy = 0
	return w
}

// lookMost is how many events one poll or Read takes: a peer that sends faster than
// they are handled must not keep rx.mu from a deadline, from Close, or from the
// janitor, which serves other sessions too. A ring can hold more 8-byte messages.
const lookMost = 4096

// lookAgain is called when there may be more events than lookMost: waiting operations
// look again before they sleep, and if there are none the janitor does.
func (s *Session) lookAgain() {
	s.rd.signal()
	s.wr.signal()
	s.idle.join(s)
}

// poke makes progress for others than a Read. sure: look even if that means waiting for
// rx.mu, as its holder may just have finished looking.
func (s *Session) poke(sure bool) {
	if sure {
		s.rx.mu.Lock()
	} else if !s.rx.mu.TryLock() {
		return
	}
	s.look()
	s.rx.mu.Unlock()
}

// look polls, and sends what has become due. rx.mu is held.
func (s *Session) look() {
	if !s.gone {
		s.poll()
		s.serviceTx()
	}
}

// serviceTx sends what receiving has made due.
func (s *Session) serviceTx() {
	if s.creditDue() || s.tx.waiting.Load() {
		s.flush()
	}
}

// The methods below want rx.mu held.

func (s *Session) drop() {
	s.ep.Drop()
	s.dealtWith()
}

func (s *Session) keep() {
	s.ep.Keep()
	s.rx.kept++
}

func (s *Session) handle(ev *Event) {
	switch ev.Kind {
	case Message:
		s.handleMessage(ev.Msg)
	case ReadDone:
		s.readCompleted(ev)
	case WriteDone:
		s.writeCompleted(ev)
	}
}

// handleMessage acts on what a message says, whether or not anybody reads
// (D3). Payload stays in its buffer.
func (s *Session) handleMessage(m []byte) {
	rx := &s.rx
	if len(m) < headerLen {
		s.ep.Drop()
		s.violation("a message of %d bytes", len(m))
		return
	}
	s.counted(m)
	t, flags := msgType(m[0]), m[1]
	switch t {
	case msgData, msgFill, msgOfferRead, msgOfferWrite:
		s.handlePayload(t, flags, m)
		return
	}
	c := control{t: t, flags: flags}
	need := c.size()
	if t == msgUrgent {
		need++
	}
	if len(m) < need {
		s.ep.Drop()
		s.violation("a message of type %d with %d bytes", t, len(m))
		return
	}
	b := m[headerLen:]
	if need >= headerLen+idLen {
		c.id = le.Uint32(b)
		switch t {
		case msgGrant, msgInbox:
			c.desc = getDesc(b[idLen:])
		case msgReadDone, msgWriteDone, msgEmptied:
			c.desc.Addr = le.Uint64(b[idLen:])
		}
	}
	if t == msgUrgent {
		rx.urgent = append(rx.urgent[:0], b[:min(len(b), MaxUrgent)]...)
		select {
		case rx.urgentCh <- struct{}{}:
		default:
		}
	}
	s.ep.Drop()
	if t != msgCredit {
		s.dealtWith()
	}
	s.handleControl(&c)
}

func (s *Session) handleControl(c *control) {
	switch c.t {
	case msgCredit, msgUrgent:
	case msgGrant:
		s.grantByPeer(c.id, c.desc, c.flags)
	case msgReadDone:
		s.readDoneByPeer(c.id, c.desc.Addr, c.flags)
	case msgWriteDone:
		s.writeDoneByPeer(c.id, c.desc.Addr, c.flags&flagLast != 0)
	case msgCancelRead:
		s.withdrawnByPeer(c.id)
	case msgCancelWrite:
		s.cancelByPeer(c.id)
	case msgRefuse:
		s.refusedByPeer(c.id)
	case msgAskInbox:
		s.askedForInbox()
	case msgLeaveInbox:
		s.leftByPeer()
	case msgInbox:
		s.tx.mu.Lock()
		s.inboxOfPeer(c.desc)
		s.tx.mu.Unlock()
	case msgEmptied:
		s.tx.mu.Lock()
		s.emptiedByPeer(c.desc.Addr)
		s.tx.mu.Unlock()
	case msgShutdown, msgClose, msgAbort:
		s.endedByPeer(c.t)
	case msgCloseAck:
		s.acknowledged()
	case msgPing:
		s.sendControl(control{t: msgPong})
	case msgPong:
	default:
		s.violation("a message of unknown type %d", c.t)
	}
}

// endedByPeer handles the end of the peer's stream; unless t is Shutdown, the peer has
// closed as well.
func (s *Session) endedByPeer(t msgType) {
	rx := &s.rx
	if rx.shut && t == msgShutdown || rx.closed || rx.open != nil {
		s.violation("a message of type %d out of place", t)
		return
	}
	if !rx.shut {
		rx.shut, rx.aborted = true, t == msgAbort
	}
	if t != msgShutdown {
		rx.closed = true
		s.wr.set(stPeerClosed)
		s.leftForGood()
		if !s.lim.Ring() {
			s.sendControl(control{t: msgCloseAck})
		}
	}
	s.readable()
}

// handlePayload keeps a message with payload for Read, and takes up an offer.
func (s *Session) handlePayload(t msgType, flags byte, m []byte) {
	rx := &s.rx
	if rx.shut || rx.open != nil {
		s.ep.Drop()
		s.violation("payload behind the end of the stream, or behind an open offer")
		return
	}
	if t == msgFill && !s.fill(m) {
		s.ep.Drop()
		return
	}
	if t == msgData || t == msgFill {
		rx.cut = flags&flagMore != 0
		if rx.discard || len(m) == headerLen {
			if t == msgFill {
				s.empty(int64(le.Uint32(m[headerLen:])))
			}
			s.drop()
			return
		}
		s.keep()
		s.readable()
		return
	}
	tl, err := newTail(t, m)
	if err == nil && s.caps&tl.needs() == 0 {
		err = errors.New("an offer of a kind that this end has not said it can take")
	}
	if err != nil {
		s.ep.Drop()
		s.violation("%v", err)
		return
	}
	rx.cut = flags&flagMore != 0
	rx.open = tl
	if rx.discard {
		s.drop()
		s.pump()
		return
	}
	rx.tails = append(rx.tails, tl)
	s.keep()
	s.readable()
}

// readable wakes a Read that sleeps.
func (s *Session) readable() {
	if s.rd.wants.Load() != 0 {
		s.rd.signal()
	}
}
