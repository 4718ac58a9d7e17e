package session

import "sync/atomic"

// Flow control, where the provider has none of its own (Limits.Window is not 0). Each
// end has as many credits as the other has receive buffers posted, less creditBuffers.
// Every message except Credit costs one. Every header says how many messages its
// sender has dealt with: their buffers are posted again, and the credits return.

// creditCounts count all messages but Credit, modulo 2³². received, freed and peerFreed
// change under rx.mu, advertised under tx.mu.
type creditCounts struct {
	received   atomic.Uint32 // the peer's, received
	freed      atomic.Uint32 // … and dealt with
	advertised atomic.Uint32 // … and reported to the peer as such
	peerFreed  atomic.Uint32 // ours, dealt with by the peer
}

// creditBuffers receive buffers of the window are for Credit messages (see creditDue).
const creditBuffers = ControlReserve

// maxWindow keeps credit arithmetic far from wrapping.
const maxWindow = 1 << 20

// credit is how many more messages the peer has buffers for. tx.mu is held.
func (s *Session) credit() int {
	if s.peer.credits == 0 {
		return maxWindow
	}
	under := int32(s.tx.sent - s.credits.peerFreed.Load())
	if under < 0 {
		s.violation("it has dealt with %d messages that were not sent", -under)
		return 0
	}
	return int(int32(s.peer.credits) - under)
}

// creditDue reports whether to tell the peer of the buffers that were posted again:
// after half of those that data may use, or when credit for control may run short.
// Credit messages cost no credit, or they would cause each other without end. They
// have buffers of their own, and no more than creditBuffers of them can be under
// way: a peer that does not listen gets one for each half of its credits, and one
// for each of the last few messages that it can still send.
func (s *Session) creditDue() bool {
	if s.lim.Window == 0 {
		return false
	}
	adv := s.credits.advertised.Load()
	unsaid := s.credits.freed.Load() - adv
	left := s.granted() - (s.credits.received.Load() - adv)
	return unsaid >= max(ControlReserve/2, (s.granted()-ControlReserve)/2) || unsaid > 0 && left <= ControlReserve/2
}

// granted is how many messages, Credit aside, the peer may have under way.
func (s *Session) granted() uint32 { return uint32(s.lim.Window - creditBuffers) }

// dealtWith counts a message whose buffer was given back, where there are credits.
// rx.mu is held.
func (s *Session) dealtWith() {
	if s.lim.Window != 0 {
		s.credits.freed.Add(1)
	}
}

// counted counts a message and takes the credit that it brings. rx.mu is held.
func (s *Session) counted(m []byte) {
	s.rx.messages++
	if s.lim.Window == 0 {
		return
	}
	if msgType(m[0]) != msgCredit {
		s.credits.received.Add(1)
	}
	credit, was := le.Uint32(m[4:]), s.credits.peerFreed.Load()
	if credit == was {
		return
	}
	if credit-was > maxWindow {
		s.violation("its credit goes from %d to %d", was, credit)
		return
	}
	s.credits.peerFreed.Store(credit)
	if s.wr.wants.Load() != 0 {
		s.wr.signal()
	}
}
