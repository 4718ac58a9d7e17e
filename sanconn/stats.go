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
	st := c.past
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
func (st *Stats) add(s session.Stats) { st.Stats.Add(s) }
