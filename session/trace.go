package session

import (
	"net"
	"sync/atomic"
	"time"

	"github.com/sanconn/san/internal/trace"
	"github.com/sanconn/san/session/internal/wire"
)

// traced is an endpoint whose steps are traced, one line each (docs/DEBUGGING.md). It is between the
// session and the provider's endpoint, so a session that is not traced has no part of it.
type traced struct {
	Endpoint
	log  *trace.Log
	conn uint64

	data, control []byte       // reserved room, for the sending methods
	out, in       atomic.Int64 // how far both streams have come, in bytes
	over          atomic.Bool  // the end was traced
}

// flushTime bounds how long the end of a session waits for its lines to be written.
const flushTime = 100 * time.Millisecond

func newTraced(ep Endpoint, log *trace.Log, number uint64) *traced {
	t := &traced{Endpoint: ep, log: log, conn: number}
	l := ep.Limits()
	t.printf("- begins provider=%s maxmessage=%d window=%d", l.Provider, l.MaxMessage, l.Window)
	return t
}

func (t *traced) printf(format string, args ...any) { t.log.Printf(t.conn, format, args...) }

// message traces a message; own is the stream of the message's direction.
func (t *traced) message(dir string, m []byte, own, other *atomic.Int64) {
	n, back := wire.Stream(m)
	if back {
		own = other
	}
	if n == 0 {
		t.printf("%s %s", dir, wire.Text(m))
		return
	}
	t.printf("%s %s stream=%d+%d", dir, wire.Text(m), own.Add(n)-n, n)
}

func (t *traced) sends(m []byte) {
	if len(m) > 0 {
		t.message(">", m, &t.out, &t.in)
	}
}

// Reserve implements Messages, like the methods below.
func (t *traced) Reserve(min, max int) []byte {
	t.data = t.Endpoint.Reserve(min, max)
	return t.data
}

func (t *traced) Commit(n int) {
	t.sends(t.data[:n]) // before the peer may have the message
	t.Endpoint.Commit(n)
}

func (t *traced) ReserveControl(n int) []byte {
	t.control = t.Endpoint.ReserveControl(n)
	return t.control
}

func (t *traced) CommitControl(n int) {
	t.sends(t.control[:n])
	t.Endpoint.CommitControl(n)
}

func (t *traced) Poll(ev *Event) bool {
	if !t.Endpoint.Poll(ev) {
		if err := t.Endpoint.Err(); err != nil && !t.over.Swap(true) {
			t.printf("- over: %v", err)
		}
		return false
	}
	switch ev.Kind {
	case Message:
		t.message("<", ev.Msg, &t.in, &t.out)
	case ReadDone:
		t.printf("- read done id=%d%s", ev.ID, suffix(ev.Err))
	case WriteDone:
		t.printf("- write done id=%d%s", ev.ID, suffix(ev.Err))
	}
	return true
}

// suffix returns an error's text for the end of a line.
func suffix(err error) string {
	if err == nil {
		return ""
	}
	return " error: " + err.Error()
}

func (t *traced) Close() error {
	t.printf("- close")
	err := t.Endpoint.Close()
	t.log.Flush(flushTime)
	return err
}

func (t *traced) Abort() {
	t.printf("- abort")
	t.Endpoint.Abort()
	t.log.Flush(flushTime)
}

func (t *traced) Memory() Memory {
	if m := t.Endpoint.Memory(); m != nil {
		return tracedMemory{m, t}
	}
	return nil
}

// tracedMemory is the Memory of a traced endpoint.
type tracedMemory struct {
	Memory
	t *traced
}

// Expose implements Memory, like the methods below.
func (m tracedMemory) Expose(b []byte, rights Rights) (Descriptor, error) {
	d, err := m.Memory.Expose(b, rights)
	m.t.printf("- expose memory=%d key=%#x rights=%v%s", len(b), d.Key, rights, suffix(err))
	return d, err
}

func (m tracedMemory) Revoke(d Descriptor) {
	m.t.printf("- revoke memory=%d key=%#x", d.Len, d.Key)
	m.Memory.Revoke(d)
	m.t.printf("- revoked key=%#x", d.Key)
}

// CommitReturn implements Memory.
func (m tracedMemory) CommitReturn(n int, from Descriptor) {
	m.t.sends(m.t.control[:n])
	m.t.printf("- returns memory=%d key=%#x", from.Len, from.Key)
	m.Memory.CommitReturn(n, from)
}

// A full queue is not traced: a session that waits for room there may look again and again.

func (m tracedMemory) Read(into []byte, from Descriptor, off int, id uint32) error {
	err := m.Memory.Read(into, from, off, id)
	if err != ErrWouldBlock {
		m.t.printf("- read id=%d bytes=%d at=%d key=%#x%s", id, len(into), off, from.Key, suffix(err))
	}
	return err
}

func (m tracedMemory) Write(from []byte, to Descriptor, off int, id uint32) error {
	err := m.Memory.Write(from, to, off, id)
	if err != ErrWouldBlock {
		m.t.printf("- write id=%d bytes=%d at=%d key=%#x%s", id, len(from), off, to.Key, suffix(err))
	}
	return err
}

// String returns the name of the right; a session exposes memory with one right.
func (r Rights) String() string {
	if r == RemoteRead {
		return "read"
	}
	return "write"
}

// Name makes the trace and Debug show which connection the session carries. Debug calls who, which must
// neither block nor keep the connection alive.
func (s *Session) Name(local, remote net.Addr, who func() string) {
	s.who.Store(&who)
	if t, ok := s.ep.(*traced); ok {
		t.printf("- carries %v %v", local, remote)
	}
}
