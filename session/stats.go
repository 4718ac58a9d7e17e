package session

// Stats are the counters of one session since its start.
type Stats struct {
	BytesSent, BytesReceived               uint64 // the application's bytes
	MessagesSent, MessagesReceived         uint64 // control messages included
	OffersSent, OffersReceived             uint64 // rendezvous transfers, by direction of the data
	OfferedBytesSent, OfferedBytesReceived uint64 // bytes that moved by RDMA, inboxes included
	Stalls                                 uint64 // times that data ran out of credit
	NoBox                                  uint64 // times that there was no memory to send through, here or at the peer: see regcache.DefaultArena
	Unregistered                           uint64 // large Writes and Reads that were copied as the application's memory could not be registered or exposed
	Sleeps                                 uint64 // times that a Read or Write slept
	Polls                                  uint64 // waits of Read or Write that polling ended

	// Bytes that were not copied at this end: all others were copied once.
	DirectBytesSent, DirectBytesReceived uint64 // moved by RDMA from or to the application's own memory
	LentBytesSent, LentBytesReceived     uint64 // filled or read by the application where they lie
}

// Stats returns a snapshot of the counters.
func (s *Session) Stats() Stats {
	var st Stats
	s.rxMu.Lock()
	rx := &s.rx
	st.BytesReceived, st.MessagesReceived, st.OffersReceived = rx.bytes, rx.messages, rx.offers
	st.OfferedBytesReceived = rx.movedBytes + rx.boxedBytes
	st.DirectBytesReceived, st.LentBytesReceived = rx.movedBytes, rx.lentBytes
	st.Unregistered = rx.unregistered
	s.rxMu.Unlock()
	s.txMu.Lock()
	tx := &s.tx
	st.BytesSent, st.MessagesSent, st.OffersSent = tx.bytes, tx.messages, tx.offers
	st.OfferedBytesSent = tx.movedBytes + tx.boxedBytes
	st.DirectBytesSent, st.LentBytesSent = tx.movedBytes, tx.lentBytes
	st.Stalls, st.NoBox = tx.stalls, tx.noBox
	st.Unregistered += tx.unregistered
	s.txMu.Unlock()
	for _, sd := range s.sides() {
		st.Sleeps += sd.sleeps.Load()
		st.Polls += sd.polls.Load()
	}
	return st
}
