package sanconn

import "github.com/sanconn/san/session"

// Stats are the counters of one connection since its start, on whatever has carried it:
// BytesSent and BytesReceived are of both carriers, all others of SANs.
type Stats struct {
	session.Stats
	TCPBytesSent, TCPBytesReceived uint64 // of the application's bytes, those by TCP
}

// Stats returns a snapshot of the connection's counters.
func (c *Conn) Stats() Stats {
	c.mu.Lock()
	var st Stats
	if c.past != nil {
		st = *c.past
	}
	if c.session != nil {
		st.add(c.session.Stats())
	}
	c.mu.Unlock()
	st.TCPBytesSent = c.out.written.Load() - c.cfg.BytesWritten
	st.TCPBytesReceived = c.in.bytes.Load() - c.cfg.BytesRead
	st.BytesSent += st.TCPBytesSent
	st.BytesReceived += st.TCPBytesReceived
	return st
}

// add adds those of a session.
func (st *Stats) add(t session.Stats) {
	s := &st.Stats
	for _, c := range []struct {
		to *uint64
		n  uint64
	}{
		{&s.BytesSent, t.BytesSent}, {&s.BytesReceived, t.BytesReceived},
		{&s.MessagesSent, t.MessagesSent}, {&s.MessagesReceived, t.MessagesReceived},
		{&s.OffersSent, t.OffersSent}, {&s.OffersReceived, t.OffersReceived},
		{&s.OfferedBytesSent, t.OfferedBytesSent}, {&s.OfferedBytesReceived, t.OfferedBytesReceived},
		{&s.Stalls, t.Stalls}, {&s.NoBox, t.NoBox}, {&s.Unregistered, t.Unregistered}, {&s.Sleeps, t.Sleeps}, {&s.Polls, t.Polls},
		{&s.DirectBytesSent, t.DirectBytesSent}, {&s.DirectBytesReceived, t.DirectBytesReceived},
		{&s.LentBytesSent, t.LentBytesSent}, {&s.LentBytesReceived, t.LentBytesReceived},
	} {
		*c.to += c.n
	}
}
