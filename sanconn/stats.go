package sanconn

import (
	"reflect"

	"github.com/sanconn/san/session"
)

// Stats are the counters of one connection since its start, on both carriers: BytesSent and
// BytesReceived count both carriers, all others SANs only. The embedded counters, each a uint64 that
// session.Stats describes, are Bytes, Messages, Offers, OfferedBytes, DirectBytes and LentBytes, each
// once followed by Sent and once by Received; and Stalls, NoBox, Unregistered, Sleeps and Polls.
type Stats struct {
	session.Stats
	TCPBytesSent, TCPBytesReceived uint64 // the application's bytes that went by TCP
}

// Stats returns a snapshot of the connection's counters.
func (c *Conn) Stats() Stats {
	c.mu.Lock()
	var st Stats
	if c.past != nil {
		st = c.past.Stats
	}
	if c.session != nil {
		st.add(c.session.Stats())
	}
	c.mu.Unlock()
	st.TCPBytesSent += c.out.written.Load()
	st.TCPBytesReceived += c.in.bytes.Load()
	st.BytesSent += st.TCPBytesSent
	st.BytesReceived += st.TCPBytesReceived
	return st
}

// add adds the counters of a session, all of which are sums.
func (st *Stats) add(t session.Stats) {
	sums, counts := reflect.ValueOf(&st.Stats).Elem(), reflect.ValueOf(t)
	for i := range sums.NumField() {
		sums.Field(i).SetUint(sums.Field(i).Uint() + counts.Field(i).Uint())
	}
}
