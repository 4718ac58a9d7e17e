package session_test

import (
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/session"
)

// look is how many events one poll of the session takes at most.
const look = 4096

// flooded is an endpoint whose peer sends messages faster than the session handles them.
type flooded struct {
	*twin.Endpoint
	msg  []byte
	left atomic.Int64 // messages
	ours bool         // the last Poll returned one of them

	at   int64 // when so many are left …
	then func()
	next func() // makes the next one
}

func (f *flooded) around(e *twin.Endpoint) session.Endpoint {
	f.Endpoint = e
	return f
}

func (f *flooded) Poll(ev *session.Event) bool {
	left := f.left.Load()
	if left == 0 {
		return f.Endpoint.Poll(ev)
	}
	if left == f.at {
		f.then()
	}
	f.left.Add(-1)
	if f.next != nil {
		f.next()
	}
	f.ours = true
	*ev = session.Event{Kind: session.Message, Msg: f.msg}
	return true
}

func (f *flooded) Drop() {
	if f.ours {
		f.ours = false
		return
	}
	f.Endpoint.Drop()
}

func flood(typ byte) *flooded { return &flooded{msg: append([]byte{typ}, make([]byte, header-1)...)} }

// floods are messages without an effect or a cost.
var floods = map[string]struct {
	cfg twin.Config
	typ byte
}{"ring": {ring, tPong}, "messages": {messages, tCredit}}

// A peer that sends faster than messages are handled does not keep a Read or Write from its deadline,
// which is noticed within a few polls.
func TestAFloodKeepsNobodyFromADeadline(t *testing.T) {
	type call struct {
		wait      func(*session.Session) (int, error)
		interrupt func(*session.Session, bool)
	}
	for what, call := range map[string]call{
		"Read":  {func(s *session.Session) (int, error) { return s.Read(make([]byte, 100)) }, (*session.Session).InterruptRead},
		"Write": {func(s *session.Session) (int, error) { return s.Write(pattern(1 << 20)) }, (*session.Session).InterruptWrite},
	} {
		for name, kind := range floods {
			t.Run(what+" "+name, func(t *testing.T) {
				inBubble(t, func(t *testing.T) {
					f := flood(kind.typ)
					s, _, _ := negotiatedOn(t, kind.cfg, session.Config{KeepAlive: -1}, f.around)
					const all = 40 * look
					for _, at := range []int64{all, all - 2*look - 1} { // the first look, and a later one
						f.at, f.then = at, func() { call.interrupt(s, true) }
						f.left.Store(all)
						_, err := call.wait(s)
						wantErr(t, what, err, session.ErrInterrupted)
						if after := at - f.left.Load(); after > 3*look {
							t.Errorf("it went on for %d messages", after)
						}
						f.left.Store(0)
						call.interrupt(s, false)
					}
				})
			})
		}
	}
}

// A peer that requests and leaves inboxes without pause does not keep a Read from its deadline, although
// opening an inbox takes as long as thousands of other messages.
func TestAFloodOfInboxesKeepsNobodyFromADeadline(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := flood(tAskInbox)
		opened := 0
		s, _, p := negotiatedOn(t, buffered, session.Config{}, func(e *twin.Endpoint) session.Endpoint {
			f.Endpoint = e
			return onMemory{f, &slowAlloc{e.Memory(), func() { opened++ }}}
		})
		f.next = func() {
			nap(2 * latency) // the inbox that was left has been revoked
			for ev := (session.Event{}); p.Poll(&ev); p.Drop() {
				if ev.Msg[0] != tCredit {
					p.dropped++
				}
			}
			f.msg[0] = tAskInbox + tLeaveInbox - f.msg[0]
			le.PutUint32(f.msg[4:], p.dropped)
		}
		f.msg[0] = tLeaveInbox
		f.at, f.then = 200, func() { s.InterruptRead(true) }
		f.left.Store(f.at)
		_, err := s.Read(make([]byte, 100))
		wantErr(t, "Read", err, session.ErrInterrupted)
		if opened > 3 {
			t.Errorf("%d inboxes were opened behind the deadline", opened)
		}
		f.left.Store(0)
	})
}

// A peer that sends single bytes without pause does not keep a Read that has room for many from
// returning.
func TestAFloodOfBytesEndsARead(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := flood(tData)
		f.msg = append(f.msg, 'x')
		s, _, _ := negotiatedOn(t, ring, session.Config{}, f.around)
		f.left.Store(40 * look)
		n, err := s.Read(make([]byte, 40*look))
		if n < 1 || n > 2*look || err != nil {
			t.Errorf("%d bytes, %v", n, err)
		}
		f.left.Store(0)
	})
}

// A peer that sends faster than messages are handled does not keep Close from ending the session.
func TestAFloodKeepsNobodyFromClose(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := flood(tPong)
		s, e, _ := negotiatedOn(t, ring, session.Config{}, f.around)
		const all = 40 * look
		f.at, f.then = all-10, func() {
			go s.Close()
			for { // until Close has begun
				if _, err := s.Write(nil); err == session.ErrClosed {
					return
				}
				runtime.Gosched()
			}
		}
		f.left.Store(all)
		_, err := s.Read(make([]byte, 100))
		wantErr(t, "Read", err, session.ErrClosed)
		<-s.Closed()
		if after := f.at - f.left.Load(); after > 4*look || !e.Closed() {
			t.Errorf("it went on for %d messages", after)
		}
	})
}

// A peer that sends faster than messages are handled does not keep the idle poller from other sessions.
func TestAFloodKeepsNobodyFromTheIdlePoller(t *testing.T) {
	for name, kind := range floods {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				f := flood(kind.typ)
				negotiatedOn(t, kind.cfg, session.Config{KeepAlive: -1}, f.around)
				_, _, p := negotiated(t, kind.cfg, session.Config{KeepAlive: -1}) // only the idle poller looks here
				const all = 40 * look
				f.left.Store(all)
				p.send(tPing, 0)
				p.expect(tPong)
				if left := f.left.Load(); left == all || left < all-10*look {
					t.Errorf("%d messages of the other session's %d came before", all-left, all)
				}
			})
		})
	}
}

// What a poll has left because it was cut short is taken by the next poll, without waiting for another
// message or for the idle poller's tick.
func TestAPollThatIsCutShortGoesOn(t *testing.T) {
	for name, test := range map[string]func(*testing.T){
		"a Read":                        testCutShortBeforeARead,
		"a Read that waits":             testCutShortInARead,
		"a Write that waits for credit": testCutShortInAWrite,
		"nobody":                        testCutShortBesideNobody,
	} {
		t.Run(name, func(t *testing.T) { inBubble(t, test) })
	}
}

// cutShort is more events than a poll takes.
const cutShort = 5*look + 10

var largeRing = func() twin.Config {
	cfg := ring
	cfg.QueueBytes = 1 << 20
	return cfg
}()

// queue sends more messages without an effect than a poll takes, and then one of the given type.
func (p *raw) queue(typ byte, body ...byte) {
	p.t.Helper()
	for range cutShort {
		if !p.send(tPong, 0) {
			p.t.Fatal("no room")
		}
	}
	p.send(typ, 0, body...)
}

func promptly(t *testing.T, began time.Time) {
	t.Helper()
	if took := time.Since(began); took > 2*latency {
		t.Errorf("it took %v, with a latency of %v", took, latency)
	}
}

func testCutShortBeforeARead(t *testing.T) {
	s, _, p := negotiated(t, largeRing, session.Config{})
	p.queue(tData, 'x')
	pass(2 * latency) // all of it has arrived before the idle poller's first tick
	began := time.Now()
	readFull(t, s, 1)
	promptly(t, began)
}

func testCutShortInARead(t *testing.T) {
	s, _, p := negotiated(t, largeRing, session.Config{})
	r := goRead(s, make([]byte, 1))
	pass(time.Second)
	began := time.Now()
	p.queue(tData, 'x')
	if x := within(t, r); x.n != 1 || x.err != nil {
		t.Errorf("Read: %+v", x)
	}
	promptly(t, began)
}

func testCutShortInAWrite(t *testing.T) {
	cfg := messages
	cfg.Limits.Window, cfg.SendQueue = 2*cutShort, 2*cutShort
	s, _, p := rawPair(t, cfg, session.Config{KeepAlive: -1, SendBudget: 1})
	p.expect(tNegotiate)
	p.dropped = 0
	const credits = 16
	p.send(tNegotiate, 0, parameters(version, credits, uint32(cfg.Limits.MaxMessage), 3)...)
	negotiate(t, s)
	data := pattern((credits - session.ControlReserve + 5) * (cfg.Limits.MaxMessage - header))
	w := goWrite(s, data)
	pass(time.Second)
	select {
	case x := <-w:
		t.Fatalf("it does not wait: %+v", x)
	default:
	}
	began := time.Now()
	sent := credits - uint32(session.ControlReserve) // all that it had credit for
	p.queue(tPong)
	p.dropped = sent
	p.send(tCredit, 0)
	if x := within(t, w); x.n != len(data) || x.err != nil {
		t.Errorf("Write: %+v", x)
	}
	promptly(t, began)
}

func testCutShortBesideNobody(t *testing.T) {
	_, _, p := negotiated(t, largeRing, session.Config{})
	pass(time.Second)
	p.queue(tPing)
	p.expect(tPong)
}
