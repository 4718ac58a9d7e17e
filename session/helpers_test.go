package session_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sanconn/san/session"
	"github.com/sanconn/san/session/twin"
)

// The wire as docs/PROTOCOL.md has it, written down once more: a test that
// took these numbers from the session could not see one change.
const (
	tNegotiate   = 1
	tData        = 2
	tCredit      = 3
	tOfferRead   = 4
	tOfferWrite  = 5
	tGrant       = 6
	tReadDone    = 7
	tWriteDone   = 8
	tCancelRead  = 9
	tCancelWrite = 10
	tShutdown    = 11
	tClose       = 12
	tCloseAck    = 13
	tAbort       = 14
	tPing        = 15
	tPong        = 16
	tUrgent      = 17
	tRefuse      = 18
	tAskInbox    = 19
	tInbox       = 20
	tFill        = 21
	tEmptied     = 22
	tLeaveInbox  = 23

	header = 8
)

var le = binary.LittleEndian

// Kinds of endpoint that the directed tests run on.
var (
	ring   = twin.Config{Limits: session.Limits{MaxMessage: 4096}}
	byRead = twin.Config{Limits: session.Limits{
		Window: 32, MaxMessage: 4096, Threshold: 16 << 10, CanRead: true, MaxExpose: math.MaxInt,
	}}
	byWrite = twin.Config{Limits: session.Limits{
		Window: 32, MaxMessage: 4096, Threshold: 16 << 10, CanWrite: true, MaxExpose: math.MaxInt,
	}}
	boxed = twin.Config{Limits: session.Limits{
		Window: 32, MaxMessage: 4096, Threshold: 64 << 10, Inbox: 8 << 10, CanRead: true, CanWrite: true, MaxExpose: math.MaxInt,
	}}
	messages = twin.Config{Limits: session.Limits{Window: 32, MaxMessage: 4096}}
)

// forms are the ways that a large Write can go.
var forms = map[string]twin.Config{
	"by read": byRead, "boxed": boxed, "by write": byWrite, "messages": messages, "ring": ring,
}

// inBubble runs a directed test in virtual time.
func inBubble(t *testing.T, f func(*testing.T)) {
	t.Helper()
	bubble(t, fmt.Sprintf("go test ./session -run '^%s$'", t.Name()), f)
}

// nap lets a bubble's time pass, for those beside the test's own goroutine; nothing
// here sleeps in real time.
func nap(d time.Duration) { time.Sleep(d) }

// pass lets a bubble's time pass, and waits until all that is due then has been
// done: no test depends on how fast this machine is. It panics outside of a bubble.
func pass(d time.Duration) {
	nap(d)
	synctest.Wait()
}

// each runs a directed test once for each form, in virtual time.
func each(t *testing.T, f func(*testing.T, twin.Config)) {
	for name, cfg := range forms {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) { f(t, cfg) })
		})
	}
}

// inPieces has large transfers go in RDMAs of 10,000 bytes each.
func inPieces(cfg twin.Config) twin.Config {
	if !cfg.Limits.Ring() {
		cfg.Limits.MaxRDMA = 10_000
	}
	return cfg
}

// latency of the directed tests, one way.
const latency = 10 * time.Microsecond

// pair makes two sessions that have negotiated; at the end of the test they are
// aborted, and must have broken no rule.
func pair(t *testing.T, cfg twin.Config, scfg session.Config) (a, b *session.Session, ea, eb *twin.Endpoint) {
	t.Helper()
	ea, eb = twins(t, cfg)
	scfg = withoutKeepAlive(scfg)
	a, b = session.New(ea, scfg), session.New(eb, scfg)
	t.Cleanup(func() {
		for _, s := range []*session.Session{a, b} {
			s.Abort()
			<-s.Closed()
		}
		for _, e := range []*twin.Endpoint{ea, eb} {
			if left := e.Left(); left.Allocated != 0 || !e.Retired() {
				t.Errorf("left behind: %+v, retired: %v", left, e.Retired())
			}
		}
		idle()
	})
	negotiate(t, a)
	negotiate(t, b)
	return a, b, ea, eb
}

// withoutKeepAlive is a config with keepalive off unless a test asks for it: it looks now
// and then, and so hides that nobody else does.
func withoutKeepAlive(scfg session.Config) session.Config {
	if scfg.KeepAlive == 0 {
		scfg.KeepAlive = -1
	}
	return scfg
}

// twins makes two endpoints that must see no rule broken.
func twins(t *testing.T, cfg twin.Config) (a, b *twin.Endpoint) {
	cfg.Violated = func(v twin.Violation) { t.Error(v) }
	cfg.MinLatency, cfg.MaxLatency = latency, latency
	return twin.Pair(cfg)
}

// idle waits until no goroutine of the sessions is left: time stands still in a
// bubble whose test function has returned.
func idle() {
	for !session.JanitorIdle() {
		nap(time.Millisecond)
	}
}

func negotiate(t *testing.T, s *session.Session) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := s.Negotiate(ctx); err != nil {
		t.Fatalf("Negotiate: %v", err)
	}
}

// raw is a peer without a session: it says what a test wants.
type raw struct {
	t *testing.T
	*twin.Endpoint
	session.Memory        // nil: none
	dropped        uint32 // messages that cost credit and were dropped, for the header
}

func newRaw(t *testing.T, e *twin.Endpoint) *raw {
	p := &raw{t: t, Endpoint: e, Memory: e.Memory()}
	e.Start(p)
	return p
}

// Wake implements session.Waker.
func (*raw) Wake(session.Events) {}

// rawPair makes a session whose peer is the test.
func rawPair(t *testing.T, cfg twin.Config, scfg session.Config) (*session.Session, *twin.Endpoint, *raw) {
	t.Helper()
	return rawPairOn(t, cfg, scfg, func(e *twin.Endpoint) session.Endpoint { return e })
}

// rawPairOn is rawPair, with something of the test's around the session's endpoint.
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

// send sends a message; false: there is no room, or the connection is over.
func (p *raw) send(typ, flags byte, body ...byte) bool {
	n := header + len(body)
	reserve, commit := p.ReserveControl, p.CommitControl
	if n > session.MaxControl {
		reserve, commit = func(n int) []byte { return p.Reserve(n, n) }, p.Commit
	}
	b := reserve(n)
	if b == nil {
		return false
	}
	clear(b)
	b[0], b[1] = typ, flags
	le.PutUint32(b[4:], p.dropped)
	copy(b[header:], body)
	commit(n)
	return true
}

// recv takes the next message, waiting for up to a second; nil: there is none.
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

// expect takes the next message that is not Credit, and fails if it is not of
// the type.
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
	p.send(tNegotiate, 0, parameters(1, credits, uint32(cfg.Limits.MaxMessage), 3)...)
	negotiate(t, s)
	return s, e, p
}

// onMemory is an endpoint whose memory has something of the test's around it.
type onMemory struct {
	*twin.Endpoint
	mem session.Memory
}

func (e onMemory) Memory() session.Memory { return e.mem }

// withMemory is for negotiatedOn: it has around put something around the memory.
func withMemory(around func(session.Memory) session.Memory) func(*twin.Endpoint) session.Endpoint {
	return func(e *twin.Endpoint) session.Endpoint { return onMemory{e, around(e.Memory())} }
}

func u64(v ...uint64) (b []byte) {
	for _, x := range v {
		b = le.AppendUint64(b, x)
	}
	return b
}

// result is what a call that waits returns.
type result struct {
	n   int
	err error
}

func goRead(s *session.Session, p []byte) <-chan result {
	c := make(chan result, 1)
	go func() { n, err := s.Read(p); c <- result{n, err} }()
	return c
}

func goWrite(s *session.Session, p []byte) <-chan result {
	c := make(chan result, 1)
	go func() { n, err := s.Write(p); c <- result{n, err} }()
	return c
}

// within waits for a result, for as long as no bound of the session's is.
func within(t *testing.T, c <-chan result) result {
	t.Helper()
	select {
	case r := <-c:
		return r
	case <-time.After(5 * time.Minute):
		t.Fatalf("hangs\n%s", stacks())
		panic("unreachable")
	}
}

// pattern is n bytes that tell their position.
func pattern(n int) []byte {
	b := make([]byte, n)
	stream(b, 0, 0, 0)
	return b
}

// readFull reads n bytes.
func readFull(t *testing.T, s *session.Session, n int) []byte {
	t.Helper()
	b := make([]byte, n)
	for got := 0; got < n; {
		k, err := s.Read(b[got:])
		if err != nil {
			t.Fatalf("Read after %d bytes of %d: %v", got, n, err)
		}
		got += k
	}
	return b
}

func wantErr(t *testing.T, what string, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%s: %v, want %v", what, err, want)
	}
}
