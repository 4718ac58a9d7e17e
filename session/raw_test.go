package session_test

import (
	"bytes"
	"testing"
	"time"

	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/session"
)

// The constants of docs/PROTOCOL.md, repeated: tests that took them from the session would not notice a
// change.
const (
	tNegotiate  = 1
	tData       = 2
	tCredit     = 3
	tOfferRead  = 4
	tReadDone   = 7
	tCancelRead = 9
	tShutdown   = 11
	tClose      = 12
	tCloseAck   = 13
	tAbort      = 14
	tPing       = 15
	tPong       = 16
	tUrgent     = 17
	tRefuse     = 18
	tAskInbox   = 19
	tInbox      = 20
	tFill       = 21
	tEmptied    = 22
	tLeaveInbox = 23
	tNote       = 24
	tNearDone   = 25

	header  = 8
	maxNote = 240
	version = 9
)

// raw is a peer without a session, which sends what a test requires.
type raw struct {
	t *testing.T
	*twin.Endpoint
	session.Memory        // nil: the endpoint has none
	dropped        uint32 // messages that cost credit and were dropped, for the header
}

func newRaw(t *testing.T, e *twin.Endpoint) *raw {
	p := &raw{t: t, Endpoint: e, Memory: e.Memory()}
	e.Start(p)
	return p
}

// rawPair makes a session whose peer is controlled by the test.
func rawPair(t *testing.T, cfg twin.Config, scfg session.Config) (*session.Session, *twin.Endpoint, *raw) {
	t.Helper()
	return rawPairOn(t, cfg, scfg, func(e *twin.Endpoint) session.Endpoint { return e })
}

// rawPairOn is rawPair with the session's endpoint wrapped by around.
func rawPairOn(t *testing.T, cfg twin.Config, scfg session.Config, around func(*twin.Endpoint) session.Endpoint) (*session.Session, *twin.Endpoint, *raw) {
	t.Helper()
	cfg.MinLatency, cfg.MaxLatency = latency, latency
	cfg.Violated = func(v twin.Violation) {
		if v.End == 0 && v.Kind != twin.BadAccess && v.Kind != twin.RevokedAccess {
			t.Error(v)
		}
	}
	ea, eb := twin.Pair(cfg)
	p := newRaw(t, eb)
	s := session.New(around(ea), withoutKeepAlive(scfg))
	t.Cleanup(func() {
		s.Abort()
		if <-s.Closed(); !ea.Retired() {
			t.Error("the endpoint was not retired")
		}
		eb.Abort()
		idle()
	})
	return s, ea, p
}

// negotiated is rawPair, with negotiation done.
func negotiated(t *testing.T, cfg twin.Config, scfg session.Config) (*session.Session, *twin.Endpoint, *raw) {
	t.Helper()
	return negotiatedOn(t, cfg, scfg, func(e *twin.Endpoint) session.Endpoint { return e })
}

// negotiatedOn is rawPairOn, with negotiation done.
func negotiatedOn(t *testing.T, cfg twin.Config, scfg session.Config, around func(*twin.Endpoint) session.Endpoint) (*session.Session, *twin.Endpoint, *raw) {
	t.Helper()
	s, e, p := rawPairOn(t, cfg, scfg, around)
	p.expect(tNegotiate)
	credits := uint32(0)
	if w := cfg.Limits.Window; w > 0 {
		credits = uint32(w - session.ControlReserve)
	}
	p.send(tNegotiate, 0, parameters(version, credits, uint32(cfg.Limits.MaxMessage), 3)...)
	negotiate(t, s)
	return s, e, p
}

// parameters is the body of Negotiate.
func parameters(version uint16, credits, maxMsg, caps uint32) []byte {
	b := make([]byte, 40)
	copy(b, "SANc")
	le.PutUint16(b[4:], version)
	le.PutUint32(b[8:], credits)
	le.PutUint32(b[12:], maxMsg)
	le.PutUint32(b[16:], caps)
	return b
}

func u64(v ...uint64) (b []byte) {
	for _, x := range v {
		b = le.AppendUint64(b, x)
	}
	return b
}

func descriptor(b []byte) session.Descriptor {
	return session.Descriptor{Addr: le.Uint64(b), Key: le.Uint64(b[8:]), Len: le.Uint64(b[16:])}
}

// rawInbox is an inbox that the test has opened for the session.
type rawInbox struct {
	p   *raw
	mem []byte
	at  int // the next byte to be read
}

// read takes n bytes that Fills announce, and returns how many Fills there were.
func (in *rawInbox) read(n int) (b []byte, fills int) {
	in.p.t.Helper()
	for ; len(b) < n; fills++ {
		for k := int(le.Uint32(in.p.expect(tFill))); k > 0; k-- {
			b = append(b, in.mem[in.at%len(in.mem)])
			in.at++
		}
		in.p.send(tCredit, 0)
	}
	return b, fills
}

// emptied sends how much has been read.
func (in *rawInbox) emptied() { in.p.send(tEmptied, 0, u64(0, uint64(in.at))...) }

// Wake implements session.Waker.
func (*raw) Wake(session.Events) {}

// send sends a message, and returns false if there is no room or the connection has ended.
func (p *raw) send(typ, flags byte, body ...byte) bool {
	m := make([]byte, header, header+len(body))
	m[0], m[1] = typ, flags
	le.PutUint32(m[4:], p.dropped)
	return p.sendBytes(append(m, body...))
}

// sendBytes is send for a message with its header.
func (p *raw) sendBytes(m []byte) bool {
	reserve, commit := p.ReserveControl, p.CommitControl
	if len(m) > session.MaxControl {
		reserve, commit = func(n int) []byte { return p.Reserve(n, n) }, p.Commit
	}
	b := reserve(len(m))
	if b == nil {
		return false
	}
	commit(copy(b, m))
	return true
}

// recv takes the next message, for which it waits up to a second. It returns nil if none comes.
func (p *raw) recv() []byte {
	for range 10_000 {
		var ev session.Event
		if p.Poll(&ev) {
			if ev.Kind != session.Message {
				continue
			}
			m := bytes.Clone(ev.Msg)
			p.Drop()
			if m[0] != tCredit {
				p.dropped++
			}
			return m
		}
		nap(100 * time.Microsecond)
	}
	return nil
}

// expect takes the next message that is not a Credit, and fails if it is of another type.
func (p *raw) expect(typ byte) []byte {
	p.t.Helper()
	for {
		m := p.recv()
		if m == nil {
			p.t.Fatalf("no message of type %d; the connection: %v", typ, p.Err())
		}
		if m[0] == tCredit && typ != tCredit {
			continue
		}
		if m[0] != typ {
			p.t.Fatalf("a message of type %d instead of %d", m[0], typ)
		}
		return m[header:]
	}
}

func (p *raw) data(n int) (b []byte) {
	p.t.Helper()
	for len(b) < n {
		b = append(b, p.expect(tData)...)
		p.send(tCredit, 0)
	}
	return b
}

// open makes the session request an inbox by a Write, whose bytes come as messages, and opens one of n
// bytes.
func (p *raw) open(s *session.Session, n int) *rawInbox {
	p.t.Helper()
	p.asked(s)
	return p.give(n)
}

// asked makes the session request an inbox.
func (p *raw) asked(s *session.Session) {
	p.t.Helper()
	first := pattern(p.Limits().Inbox)
	w := goWrite(s, first)
	p.expect(tAskInbox)
	if got := p.data(len(first)); !bytes.Equal(got, first) {
		p.t.Error("wrong bytes before there is an inbox")
	}
	if r := within(p.t, w); r.n != len(first) || r.err != nil {
		p.t.Fatalf("Write: %+v", r)
	}
}

// give answers that request with an inbox of n bytes.
func (p *raw) give(n int) *rawInbox {
	p.t.Helper()
	in := &rawInbox{p: p, mem: make([]byte, n)}
	d, err := p.Expose(in.mem, session.RemoteWrite)
	if err != nil {
		p.t.Fatal(err)
	}
	p.send(tInbox, 0, u64(0, d.Addr, d.Key, d.Len)...)
	pass(time.Second / 2) // the session leaves an inbox after one without a Write
	return in
}

// ask makes the session open an inbox for the test.
func (p *raw) ask() session.Descriptor {
	p.t.Helper()
	p.send(tAskInbox, 0)
	b := p.expect(tInbox)
	return session.Descriptor{Addr: le.Uint64(b[8:]), Key: le.Uint64(b[16:]), Len: le.Uint64(b[24:])}
}

func (p *raw) fill(d session.Descriptor, at int, b []byte) {
	p.t.Helper()
	if err := p.Write(b, d, at, 1); err != nil {
		p.t.Fatal(err)
	}
	p.send(tFill, 0, u64(uint64(len(b)))...)
}

// expectDone takes a ReadDone and returns its count.
func (p *raw) expectDone(t *testing.T, id uint32, flags byte) []byte {
	t.Helper()
	for {
		m := p.recv()
		switch {
		case m == nil:
			t.Fatalf("no ReadDone; the connection: %v", p.Err())
		case m[0] != tReadDone:
			continue
		case le.Uint32(m[header:]) != id || m[1] != flags:
			t.Fatalf("ReadDone of %d, flags %d; want %d, %d", le.Uint32(m[header:]), m[1], id, flags)
		}
		return m[header+8:]
	}
}
