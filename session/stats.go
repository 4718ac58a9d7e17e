package session

// Stats are the counters of one session since its start.
type Stats struct {
	BytesSent, BytesReceived               uint64 // the application's bytes
	MessagesSent, MessagesReceived         uint64 // control messages included
	OffersSent, OffersReceived             uint64 // rendezvous transfers, by the direction of the data
	OfferedBytesSent, OfferedBytesReceived uint64 // bytes that moved by RDMA, including through inboxes
	Stalls                                 uint64 // times that data ran out of credit
	NoBox                                  uint64 // times that there was no memory to send through, here or at the peer: see regcache.DefaultArena
	Unregistered                           uint64 // large Writes and Reads that were copied because the application's memory could not be registered or exposed
	Sleeps                                 uint64 // times that a Read or Write slept
	Polls                                  uint64 // waits of Read or Write that polling ended

	// Bytes that were not copied at this end; all others were copied once.
	DirectBytesSent, DirectBytesReceived uint64 // moved by RDMA from or to the application's own memory
	LentBytesSent, LentBytesReceived     uint64 // filled or read by the application in place
}

// traffic has the counts of one direction, guarded by the lock of its sender or receiver.
type traffic struct {
	bytes, messages, offers               uint64
	directBytes, bufferedBytes, loanBytes uint64 // bytes as Stats describes them
	stalls, noBox, unregistered           uint64
}

// Stats returns a snapshot of the counters.
func (s *Session) Stats() Stats {
	s.rxMu.Lock()
	in := s.rx.stats
	s.rxMu.Unlock()
	s.txMu.Lock()
	out := s.tx.stats
	s.txMu.Unlock()
	st := Stats{
		BytesSent: out.bytes, BytesReceived: in.bytes,
		MessagesSent: out.messages, MessagesReceived: in.messages,
		OffersSent: out.offers, OffersReceived: in.offers,
		OfferedBytesSent: out.directBytes + out.bufferedBytes, OfferedBytesReceived: in.directBytes + in.bufferedBytes,
		Stalls: out.stalls, NoBox: out.noBox, Unregistered: out.unregistered + in.unregistered,
		DirectBytesSent: out.directBytes, DirectBytesReceived: in.directBytes,
		LentBytesSent: out.loanBytes, LentBytesReceived: in.loanBytes,
	}
	for _, sd := range s.sides() {
		st.Sleeps += sd.sleeps.Load()
		st.Polls += sd.polls.Load()
	}
	return st
}
