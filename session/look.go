package session

import (
	"github.com/sanconn/san/session/internal/wire"
)

// lookMost is how many events one look or Read takes: a peer that sends faster than
// they are handled must not keep rxMu from a deadline, from Close, or from the
// janitor, which serves other sessions too. A ring can hold more 8-byte messages.
const lookMost = 4096

// lockRx begins a use of the receiver.
func (s *Session) lockRx() {
	s.rxMu.Lock()
	s.rx.dead = s.failure.Load() != nil
}

// unlockRx ends a use of the receiver, and does what it has found to be due.
func (s *Session) unlockRx() {
	s.settleLocked()
	s.rxMu.Unlock()
}

// settleLocked does what the receiver has found to be due, and sends what that makes due.
func (s *Session) settleLocked() {
	do := &s.rx.do
	if do.fault != nil {
		s.fail(do.fault)
	}
	if do.wake {
		do.wake = false
		s.rd.signalSleeper()
	}
	if do.close.buf != nil {
		s.closeInbox(do.close)
		do.close = inbox{}
	}
	if len(do.send) > 0 {
		s.txMu.Lock()
		for _, c := range do.send {
			s.tx.owe(c)
		}
		s.unlockTx()
		do.send = do.send[:0]
	}
	if s.txWaits.Load() || s.credits.Due() {
		s.flush()
	}
}

// closeInbox gives memory back that the peer writes to no more. Revoking may block, so a
// worker does it.
func (s *Session) closeInbox(old inbox) {
	if !s.startWorker() { // never: what ends the workers has closed the inbox
		return
	}
	go func() {
		defer s.workers.Done()
		s.mem.Revoke(old.desc)
		s.mem.Free(old.buf)
	}()
}

// look takes what has come, for others than a Read. sure: even if that means to wait for
// rxMu, as its holder may just have finished looking.
func (s *Session) look(sure bool) {
	if sure {
		s.rxMu.Lock()
	} else if !s.rxMu.TryLock() {
		return
	}
	s.rx.dead = s.failure.Load() != nil
	s.lookLocked()
	s.unlockRx()
}

// lookLocked handles all events that are there, up to lookMost, and starts the transfers
// that are due; with some providers these complete at once. It returns the weight of
// the events. Before negotiation it does nothing: a spurious Wake must not take the
// negotiation message from Negotiate.
func (s *Session) lookLocked() (events int) {
	rx := &s.rx
	if !rx.begun || rx.gone {
		return 0
	}
	rx.looks++
	for again := true; again; again = rx.pump() {
		for !rx.dead && s.ep.Poll(&rx.ev) {
			s.handleLocked(&rx.ev)
			if events += rx.weight(); events >= lookMost {
				s.lookAgain()
				return events
			}
		}
	}
	return events
}

// weight is how many events the last one counts as.
func (rx *receiver) weight() int {
	w := 1 + rx.heavy
	rx.heavy = 0
	return w
}

// lookAgain is called when there may be more events than lookMost: waiting operations
// look again before they sleep, and if there are none the janitor does.
func (s *Session) lookAgain() {
	s.signalAll()
	s.joinIfAway()
}

// handleLocked acts on an event, whether or not anybody reads (D3). Payload stays in its
// buffer.
func (s *Session) handleLocked(ev *Event) {
	rx := &s.rx
	switch ev.Kind {
	case Message:
		s.handleMessageLocked(ev.Msg)
	case ReadDone:
		rx.readCompleted(ev)
	case WriteDone:
		s.txMu.Lock()
		s.tx.writeCompleted(ev.ID, ev.Err)
		s.unlockTx()
	}
	if do := &rx.do; len(do.send) > 0 || do.fault != nil {
		s.settleLocked()
	}
	rx.dead = s.failure.Load() != nil // the sender may have found a fault
}

func (s *Session) handleMessageLocked(m []byte) {
	rx := &s.rx
	h, err := wire.ParseHeader(m)
	if err != nil {
		s.ep.Drop()
		rx.violation("%v", err)
		return
	}
	s.countLocked(h)
	switch h.Type {
	case wire.TypeData, wire.TypeFill, wire.TypeOfferRead, wire.TypeOfferWrite:
		rx.payload(h, m)
	case wire.TypeGrant, wire.TypeReadDone, wire.TypeRefuse, wire.TypeCancelWrite, wire.TypeInbox, wire.TypeEmptied:
		s.aboutSendingLocked(h, m)
	default:
		s.controlLocked(h, m)
	}
}

// countLocked counts a message and takes the credit that it brings.
func (s *Session) countLocked(h wire.Header) {
	s.rx.messages++
	news, err := s.credits.Received(h.Credit, h.Type != wire.TypeCredit)
	if err != nil {
		s.rx.violation("%v", err)
	}
	if news {
		s.wakeWriters()
	}
}

// dropControl ends the use of a control message, and reports whether it was understood.
func (rx *receiver) dropControl(t wire.Type, err error) bool {
	rx.msgs.Drop()
	if t != wire.TypeCredit {
		rx.credits.DealtWith()
	}
	if err != nil {
		rx.violation("%v", err)
	}
	return err == nil
}

// aboutSendingLocked handles a message about what this end sends.
func (s *Session) aboutSendingLocked(h wire.Header, m []byte) {
	var act func(*sender)
	var err error
	switch h.Type {
	case wire.TypeGrant:
		var g wire.Grant
		g, err = wire.ParseGrant(m)
		act = func(tx *sender) { tx.grantedByPeer(g) }
	case wire.TypeReadDone:
		var d wire.Done
		d, err = wire.ParseDone(m)
		act = func(tx *sender) { tx.readByPeer(d) }
	case wire.TypeRefuse:
		var c wire.Cancel
		c, err = wire.ParseCancel(m)
		act = func(tx *sender) { tx.takeBack(c.ID) }
	case wire.TypeCancelWrite:
		var c wire.Cancel
		c, err = wire.ParseCancel(m)
		act = func(tx *sender) { tx.cancelledByPeer(c.ID) }
	case wire.TypeInbox:
		var i wire.Inbox
		i, err = wire.ParseInbox(m)
		act = func(tx *sender) { tx.inboxByPeer(i.Memory) }
	case wire.TypeEmptied:
		var e wire.Emptied
		e, err = wire.ParseEmptied(m)
		act = func(tx *sender) { tx.emptiedByPeer(e.Count) }
	}
	if !s.rx.dropControl(h.Type, err) {
		return
	}
	if gone := h.Flags&wire.FlagGone != 0; gone && (h.Type == wire.TypeReadDone || h.Type == wire.TypeGrant) {
		s.wr.set(stPeerClosed)
	}
	s.withSender(act)
	if h.Type == wire.TypeInbox {
		s.restBoxes()
	}
}

// controlLocked handles a message about what the peer sends, or about the connection.
func (s *Session) controlLocked(h wire.Header, m []byte) {
	rx := &s.rx
	switch h.Type {
	case wire.TypeUrgent:
		s.urgentLocked(m)
		return
	case wire.TypeWriteDone:
		if d, err := wire.ParseDone(m); rx.dropControl(h.Type, err) {
			rx.writtenByPeer(d)
		}
		return
	case wire.TypeCancelRead:
		if c, err := wire.ParseCancel(m); rx.dropControl(h.Type, err) {
			rx.withdrawnByPeer(c.ID)
		}
		return
	}
	rx.dropControl(h.Type, nil)
	switch h.Type {
	case wire.TypeCredit, wire.TypePong:
	case wire.TypeAskInbox:
		rx.inboxWanted()
	case wire.TypeLeaveInbox:
		rx.inboxLeft()
	case wire.TypeShutdown, wire.TypeClose, wire.TypeAbort:
		s.endedLocked(h.Type)
	case wire.TypeCloseAck:
		s.closing.acked.Store(true)
		s.wr.signal()
	case wire.TypePing:
		rx.send(wire.Plain(wire.TypePong))
	default:
		rx.violation("a message of unknown type %d", h.Type)
	}
}

// endedLocked handles the end of the peer's stream.
func (s *Session) endedLocked(t wire.Type) {
	if !s.rx.ended(t) || t == wire.TypeShutdown {
		return
	}
	s.wr.set(stPeerClosed)
	if s.kind.acks {
		s.rx.send(wire.Plain(wire.TypeCloseAck))
	}
}
