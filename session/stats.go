package session

// Stats are the counters of one session since its start.
type Stats struct {
	BytesSent, BytesReceived               uint64 // the application's bytes
	MessagesSent, MessagesReceived         uint64 // control messages included
	OffersSent, OffersReceived             uint64 // rendezvous transfers, by direction of the data
	OfferedBytesSent, OfferedBytesReceived uint64 // bytes that moved by RDMA (on shm process_vm_readv), inboxes included
	Stalls                                 uint64 // times that data ran out of credit
	Sleeps                                 uint64 // times that a Read or Write slept
	Polls                                  uint64 // waits of Read or Write that polling ended
}

// Stats returns a snapshot of the counters.
func (s *Session) Stats() Stats {
	var st Stats
	s.rx.mu.Lock()
	st.BytesReceived, st.MessagesReceived = s.rx.bytes, s.rx.messages
	st.OffersReceived, st.OfferedBytesReceived = s.rx.offers, s.rx.offerBytes
	s.rx.mu.Unlock()
	s.tx.mu.Lock()
	st.BytesSent, st.MessagesSent = s.tx.bytes, s.tx.messages
	st.OffersSent, st.OfferedBytesSent = s.tx.offers, s.tx.offerBytes
	st.Stalls = s.tx.stalls
	s.tx.mu.Unlock()
	st.Sleeps = s.rd.sleeps.Load() + s.wr.sleeps.Load()
	st.Polls = s.rd.polls.Load() + s.wr.polls.Load()
	return st
}
