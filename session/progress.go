package session

import (
	"github.com/sanconn/san/session/internal/wire"
)

// progressMost is how many events one call of progress or Read handles: a peer that sends faster than
// its messages are handled must not keep rxMu from a deadline, from Close, or from the idle poller,
// which serves other sessions too. (A ring can hold more messages, of 8 bytes.) Opening an inbox counts
// as that many, because its memory is cleared.
const progressMost = 4096

// revoke gives back memory that the peer does not write to any more. Revoking may block, so a worker
// does it.
func (e *engine) revoke(old exposed) {
	e.workers.start() // does not fail: what stops the workers has closed the inbox
	go func() {
		defer e.workers.Done()
		e.mem.Revoke(old.desc)
		e.mem.Free(old.buf)
	}()
}

// progress handles what has come, outside a Read, and returns how many events there were. sure: even if
// it has to wait for rxMu, as its holder may just have finished polling.
func (e *engine) progress(sure bool) (events int) {
	if sure {
		e.lockRx()
	} else if !e.tryLockRx() {
		return 0
	}
	defer e.unlockRx()
	return e.progressLocked()
}

// progressLocked handles all events that are there, up to progressMost, and starts the transfers that
// are due; with some providers these complete at once. It returns how many events there were. Before
// negotiation it takes none: a spurious Wake must not take the negotiation message from Negotiate.
func (e *engine) progressLocked() (events int) {
	rx := &e.rx
	rx.polls++
	for again := true; again; again = rx.advanceOffer() {
		for rx.stage == running && e.ep.Poll(&rx.ev) {
			e.handleLocked(&rx.ev)
			if events = rx.do.count(events); events >= progressMost {
				e.progressAgain()
				return events
			}
		}
	}
	return events
}

// progressAgain is called when there may be more than progressMost events: waiting operations look
// again before they sleep, and if there are none the idle poller looks.
func (e *engine) progressAgain() {
	e.signalAll()
	e.enlist()
}

// handleLocked acts on an event, even while no Read waits (D3). Payload stays in its buffer.
func (e *engine) handleLocked(ev *Event) {
	rx := &e.rx
	switch ev.Kind {
	case Message:
		e.handleMessageLocked(ev.Msg)
	case ReadDone:
		e.advances.Add(1)
		rx.readCompleted(ev)
		if e.tx.buffer.queueFull.Load() { // after readCompleted has counted
			e.withSender(func(tx *sender) {
				tx.buffer.queueFull.Store(false)
				tx.flush()
			})
		}
	case WriteDone:
		e.withSender(func(tx *sender) { tx.writeCompleted(ev.Err) })
	}
	if do := &rx.do; len(do.control) > 0 || do.fault != nil {
		e.settleLocked()
	}
	e.markOverLocked() // the sender may have found a fault
}

func (e *engine) handleMessageLocked(m []byte) {
	rx := &e.rx
	h, err := wire.ParseHeader(m)
	if err != nil {
		rx.do.violation("%v", err)
		return
	}
	e.countLocked(h)
	switch h.Type {
	case wire.TypeData, wire.TypeFill, wire.TypeOfferRead:
		rx.payload(h, m)
	case wire.TypeReadDone, wire.TypeNearDone, wire.TypeRefuse, wire.TypeInbox, wire.TypeEmptied:
		e.advances.Add(1)
		e.aboutSendingLocked(h, m)
	default:
		e.controlLocked(h, m)
	}
}

// countLocked counts a message and takes the credit in its header.
func (e *engine) countLocked(h wire.Header) {
	e.rx.stats.messages++
	news, err := e.credits.Received(h.Credit, h.Type != wire.TypeCredit)
	if err != nil {
		e.rx.do.violation("%v", err)
	}
	if news {
		e.wakeWriters()
	}
}

// dropControl drops a control message, and reports whether it was understood.
func (rx *receiver) dropControl(t wire.Type, err error) bool {
	rx.msgs.Drop()
	if t != wire.TypeCredit {
		rx.credits.DealtWith()
	}
	if err != nil {
		rx.do.violation("%v", err)
	}
	return err == nil
}

// aboutSendingLocked handles a message about what this end sends.
func (e *engine) aboutSendingLocked(h wire.Header, m []byte) {
	rx := &e.rx
	switch h.Type {
	case wire.TypeReadDone:
		if d, err := wire.ParseReadDone(m); rx.dropControl(h.Type, err) {
			if d.Flags&wire.FlagGone != 0 {
				e.peerClosedLocked(true)
			}
			e.withSender(func(tx *sender) { tx.offer.readByPeer(d, &tx.do) })
		}
	case wire.TypeNearDone:
		rx.dropControl(h.Type, nil)
		e.wakeWriters()
	case wire.TypeRefuse:
		if id, err := wire.ParseCancel(m); rx.dropControl(h.Type, err) {
			e.withSender(func(tx *sender) { tx.cancel(id) })
		}
	case wire.TypeInbox:
		if memory, err := wire.ParseInbox(m); rx.dropControl(h.Type, err) {
			e.withSender(func(tx *sender) {
				tx.buffer.inboxByPeer(memory, &tx.do, &tx.stats)
				e.restBufferLocked(tx)
			})
		}
	case wire.TypeEmptied:
		if count, err := wire.ParseEmptied(m); rx.dropControl(h.Type, err) {
			e.withSender(func(tx *sender) {
				tx.buffer.emptiedByPeer(count, &tx.do)
				tx.flush() // not only after this look, which a Read may make long
			})
		}
	}
}

// controlLocked handles a message about what the peer sends, or about the connection.
func (e *engine) controlLocked(h wire.Header, m []byte) {
	rx := &e.rx
	switch h.Type {
	case wire.TypeUrgent:
		e.urgentLocked(m)
		return
	case wire.TypeNote:
		e.noteLocked(m)
		return
	case wire.TypeCancelRead:
		if id, err := wire.ParseCancel(m); rx.dropControl(h.Type, err) {
			rx.cancelledByPeer(id)
		}
		return
	}
	rx.dropControl(h.Type, nil)
	switch h.Type {
	case wire.TypeCredit, wire.TypePong:
	case wire.TypeAskInbox:
		rx.inbox.requested()
	case wire.TypeLeaveInbox:
		rx.inbox.left()
	case wire.TypeShutdown, wire.TypeClose, wire.TypeAbort:
		e.endedByPeerLocked(h.Type)
	case wire.TypeCloseAck:
		e.acked.Store(true)
	case wire.TypePing:
		rx.do.send(wire.Plain(wire.TypePong))
	default:
		rx.do.violation("a message of unknown type %d", h.Type)
	}
}

// endedByPeerLocked handles the end of the peer's stream.
func (e *engine) endedByPeerLocked(t wire.Type) {
	if !e.rx.endedByPeer(t) || t == wire.TypeShutdown {
		return
	}
	e.peerClosedLocked(t == wire.TypeAbort)
	if !e.ring {
		e.rx.do.send(wire.Plain(wire.TypeCloseAck))
	}
}

// peerClosedLocked ends this end's direction, because the peer does not read any more; unread: it had
// unread bytes. As with TCP, bytes that cross the peer's Close cause a reset: the waiting Write, or
// else the next one, fails with EPIPE. So do unread bytes of a peer that had ended its own stream in
// order.
func (e *engine) peerClosedLocked(unread bool) {
	bits := uint32(stPeerClosed)
	e.txMu.Lock()
	crossed := e.credits.MarkedUnderWay() || e.tx.buffer.unsent() > 0 || e.wr.blocked() || e.ur.blocked()
	e.txMu.Unlock()
	switch {
	case unread && e.rx.end != byShutdown && e.rx.end != byClose:
		bits |= stPeerReset
	case unread || crossed:
		e.told.Store(true)
	}
	e.wr.set(bits)
}
