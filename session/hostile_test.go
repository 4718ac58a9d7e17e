package session_test

import (
	"context"
	"math/rand/v2"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sanconn/san/session"
	"github.com/sanconn/san/session/twin"
)

// FuzzHostilePeer: whatever a peer says, a session does not panic, does not
// hang, keeps to its endpoint's contract and to its memory, and ends when it
// is told to.
func FuzzHostilePeer(f *testing.F) {
	for seed := range uint64(30) {
		script := make([]byte, 20+10*seed)
		r := rand.NewPCG(seed, 7)
		for i := range script {
			script[i] = byte(r.Uint64())
		}
		f.Add(script)
	}
	f.Fuzz(hostile)
}

// TestHostilePeer is the fuzz test on scripts of a seed, for those who have no
// time for fuzzing.
func TestHostilePeer(t *testing.T) {
	for seed := range uint64(500) {
		r := rand.New(rand.NewPCG(seed, 8))
		script := make([]byte, 1+r.IntN(400))
		for i := range script {
			script[i] = byte(r.Uint32())
		}
		if hostile(t, script); t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

// script hands out a fuzzer's bytes; zeros when there are none left.
type script []byte

func (s *script) byte() (b byte) {
	if len(*s) > 0 {
		b, *s = (*s)[0], (*s)[1:]
	}
	return b
}

func (s *script) bytes(n int) []byte {
	n = min(n, len(*s))
	b := (*s)[:n]
	*s = (*s)[n:]
	return b
}

// number is at times small, at times what overflows.
func (s *script) number() uint64 {
	b := s.byte()
	switch b % 8 {
	case 0:
		return 0
	case 1, 2, 3:
		return uint64(s.byte())
	case 4:
		return uint64(s.byte())<<8 | uint64(s.byte())
	case 5:
		return 1 << (s.byte() % 64)
	case 6:
		return ^uint64(0) - uint64(s.byte())
	}
	return ^uint64(0) >> (s.byte() % 64)
}

func hostile(t *testing.T, input []byte) {
	bubble(t, "the script above", func(t *testing.T) {
		s := script(input[:min(len(input), 1000)]) // longer ones only take longer
		kinds := []twin.Config{ring, byRead, byWrite, messages, boxed}
		cfg := kinds[int(s.byte())%len(kinds)]
		cfg.MaxLatency = latency
		cfg.AllocBudget = 1 << 20
		if s.byte()%4 == 0 {
			cfg.Faults = twin.Faults{Expose: 0.3, Local: 0.3, Alloc: 0.3, Busy: 0.2, Short: 0.3, Stray: 0.1}
		}
		cfg.Violated = func(v twin.Violation) {
			// A descriptor or a credit that the peer made up is its own loss.
			if v.End == 0 && v.Kind == twin.Misuse {
				t.Errorf("%v", v)
			}
		}
		ea, eb := twin.Pair(cfg)
		p := newRaw(t, eb)
		ss := session.New(ea, session.Config{ReceiveBudget: 100_000, CancelTimeout: time.Second, CloseTimeout: time.Second, KeepAlive: time.Minute})

		var readers [2]<-chan error
		switch s.byte() % 8 {
		case 0: // garbage first
			p.send(s.byte(), s.byte(), s.bytes(40)...)
		case 1:
			p.send(tNegotiate, 0, parameters(1, uint32(s.number()), uint32(s.number()), uint32(s.number()))...)
		default:
			credits := uint32(0)
			if w := cfg.Limits.Window; w > 0 {
				credits = uint32(w - session.ControlReserve)
			}
			p.send(tNegotiate, 0, parameters(1, credits, 4096, uint32(s.byte()))...)
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		if ss.Negotiate(ctx) == nil {
			readers = [2]<-chan error{
				until(func() error { _, err := ss.Read(make([]byte, 70_000)); return err }),
				until(func() error { _, err := ss.Write(make([]byte, 50_000)); return err }),
			}
		}
		p.say(&s)
		if got := ea.Left().Allocated; got > 1<<20 {
			t.Errorf("the session holds %d bytes", got)
		}
		if s.byte()%2 == 0 {
			ss.Close()
		} else {
			ss.Abort()
		}
		limit := time.After(time.Minute)
		wait := func(what string, c <-chan error) {
			if c == nil {
				return
			}
			select {
			case <-c:
			case <-limit:
				t.Fatalf("%s hangs\n%s", what, stacks())
			}
		}
		wait("Read", readers[0])
		wait("Write", readers[1])
		select {
		case <-ss.Closed():
		case <-limit:
			t.Fatalf("Close hangs\n%s", stacks())
		}
		if left := ea.Left(); left.Allocated != 0 || !ea.Retired() {
			t.Errorf("left behind: %+v, retired: %v", left, ea.Retired())
		}
		eb.Abort()
		idle()
	})
}

// until calls f until it fails.
func until(f func() error) <-chan error {
	c := make(chan error, 1)
	go func() {
		for {
			if err := f(); err != nil {
				c <- err
				return
			}
		}
	}()
	return c
}

// say does what the script says.
func (p *raw) say(s *script) {
	exposed := make([]byte, 40_000)
	var descs []session.Descriptor
	lastID := uint64(0)
	for len(*s) > 0 && p.Err() == nil {
		id := lastID
		if s.byte()%4 == 0 {
			id = s.number()
		}
		desc := func() []byte {
			d := session.Descriptor{Addr: s.number(), Key: s.number(), Len: s.number()}
			switch s.byte() % 4 {
			case 0:
			case 1:
				if len(descs) > 0 {
					d = descs[int(s.byte())%len(descs)]
				}
			default:
				if p.Memory == nil {
					break
				}
				n := 1 + int(s.number()%uint64(len(exposed)))
				if x, err := p.Expose(exposed[:n], session.RemoteRead|session.RemoteWrite); err == nil {
					descs = append(descs, x)
					d = x
				}
			}
			return u64(d.Addr, d.Key, d.Len)
		}
		switch s.byte() % 26 {
		case 0:
			p.send(s.byte(), s.byte(), s.bytes(int(s.byte()))...)
		case 1, 2:
			p.send(tData, s.byte(), make([]byte, s.byte())...)
		case 3, 4:
			lastID++
			p.send(tOfferRead, s.byte(), append(append(u64(lastID|s.number()<<32), desc()...), s.bytes(9)...)...)
		case 5, 6:
			lastID++
			p.send(tOfferWrite, s.byte(), append(u64(lastID, s.number()), s.bytes(9)...)...)
		case 7:
			p.send(tGrant, s.byte()%2, append(u64(id), desc()...)...)
		case 8:
			p.send(tReadDone, s.byte()%4/3, u64(id, s.number())...)
		case 9:
			p.send(tWriteDone, s.byte(), u64(id, s.number())...)
		case 10:
			p.send(tCancelRead, 0, u64(id)...)
		case 11:
			p.send(tCancelWrite, 0, u64(id)...)
		case 12:
			p.send(tUrgent, 0, s.bytes(int(s.byte()%70))...)
		case 13:
			p.send([]byte{tPing, tPong, tCloseAck, tShutdown, tClose, tAbort}[s.byte()%6], 0)
		case 14:
			p.dropped = uint32(s.number())
		case 15:
			nap(time.Duration(s.number() % uint64(time.Minute)))
		case 16: // the grant or the offer that the session has made
			var ev session.Event
			for p.Poll(&ev) {
				if ev.Kind != session.Message {
					continue
				}
				m := ev.Msg
				if len(m) >= header+32 && (m[0] == tGrant || m[0] == tInbox || m[0] == tOfferRead) {
					d := session.Descriptor{Addr: le.Uint64(m[16:]), Key: le.Uint64(m[24:]), Len: le.Uint64(m[32:])}
					descs = append(descs, d)
					lastID = uint64(le.Uint32(m[header:]))
					n := 1 + int(s.number()%20_000)
					if m[0] != tOfferRead && p.Limits().CanWrite {
						p.Write(make([]byte, n), d, int(s.number()>>1), 1)
					} else if m[0] == tOfferRead && p.Limits().CanRead {
						p.Read(make([]byte, n), d, int(s.number()>>1), 1)
					}
				}
				if m[0] != tCredit {
					p.dropped++
				}
				p.Drop()
			}
		case 17:
			if len(descs) > 0 && s.byte()%2 == 0 {
				p.Endpoint.Hold(twin.Hold(s.byte() % 8))
			}
		case 18:
			if s.byte()%16 == 0 {
				[]func(){p.Kill, p.Abort, func() { p.Close() }, p.Cut}[s.byte()%4]()
				return
			}
		case 20:
			p.send(tRefuse, 0, u64(id)...)
		case 22:
			p.send([]byte{tAskInbox, tLeaveInbox}[s.byte()%4/3], 0)
		case 23:
			p.send(tFill, s.byte(), u64(s.number()%70_000)...)
		case 24:
			p.send(tInbox, 0, append(u64(0), desc()...)...)
		case 25:
			p.send(tEmptied, 0, u64(0, s.number()%100_000)...)
		case 21: // an offer that it can read
			if p.Memory == nil {
				break
			}
			if x, err := p.Expose(exposed, session.RemoteRead); err == nil {
				lastID++
				p.send(tOfferRead, 0, u64(lastID, x.Addr, x.Key, x.Len)...)
			}
		case 19:
			for range s.byte() {
				p.send(tData, 0, 1)
			}
		}
	}
}

// look is how many events one look takes.
const look = 4096

// flooded is an endpoint whose peer sends on and on, faster than it is listened to.
type flooded struct {
	*twin.Endpoint
	msg  []byte
	left atomic.Int64 // messages
	ours bool         // the last Poll's is one of them

	at   int64 // with that many left …
	then func()
}

func flood(typ byte) *flooded { return &flooded{msg: append([]byte{typ}, make([]byte, header-1)...)} }

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

// floods are messages that say nothing and cost nothing.
var floods = map[string]struct {
	cfg twin.Config
	typ byte
}{"ring": {ring, tPong}, "messages": {messages, tCredit}}

// A peer that sends faster than messages are handled keeps no Read and no Write from its
// deadline: that is seen after a look or two.
func TestFloodAndDeadline(t *testing.T) {
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

// … nor does one that sends bytes one by one keep a Read that has room for many.
func TestFloodOfBytes(t *testing.T) {
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

// askedForMemory counts what the session makes ready for its peer.
type askedForMemory struct {
	session.Memory
	times atomic.Int32
	then  func() // at the first
}

func (e *askedForMemory) Alloc(n int) []byte {
	if e.times.Add(1) == 1 {
		e.then()
	}
	return e.Memory.Alloc(n)
}

// … nor one that asks for inbox after inbox, each of which takes as long as many
// messages.
func TestFloodOfInboxes(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		const all = 20
		cfg := boxed
		cfg.Limits.Window, cfg.SendQueue = 3*all, 3*all
		e := &askedForMemory{}
		s, _, p := negotiatedOn(t, cfg, session.Config{KeepAlive: -1, ReceiveBudget: 10_000}, withMemory(func(under session.Memory) session.Memory {
			e.Memory = under
			return e
		}))
		for range all {
			if !p.send(tAskInbox, 0) || !p.send(tLeaveInbox, 0) {
				t.Fatal("no room")
			}
		}
		pass(2 * latency)
		e.then = func() { s.InterruptRead(true) }
		_, err := s.Read(make([]byte, 100))
		wantErr(t, "Read", err, session.ErrInterrupted)
		if n := e.times.Load(); n > all/2 {
			t.Errorf("it went on for %d inboxes", n)
		}
		for range all {
			p.expect(tInbox)
		}
		// Later messages count as ever.
		s.InterruptRead(false)
		r := goRead(s, make([]byte, 100))
		pass(time.Second)
		for range all {
			p.send(tData, 0, 'x')
		}
		if x := within(t, r); x.n != all || x.err != nil {
			t.Errorf("Read of what came at once: %d bytes, %v", x.n, x.err)
		}
	})
}

// … nor Close from the session.
func TestFloodAndClose(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		f := flood(tPong)
		s, e, _ := negotiatedOn(t, ring, session.Config{}, f.around)
		const all = 40 * look
		f.at, f.then = all-10, func() {
			go s.Close()
			for { // until that has begun
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

// … nor the janitor from other sessions.
func TestFloodAndJanitor(t *testing.T) {
	for name, kind := range floods {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				f := flood(kind.typ)
				negotiatedOn(t, kind.cfg, session.Config{KeepAlive: -1}, f.around)
				_, _, p := negotiated(t, kind.cfg, session.Config{KeepAlive: -1}) // nobody else looks here
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

// What a look that was cut short has left is taken by the next one, and nobody has to
// wait for another message, or for the janitor's tick.
func TestLookThatIsCutShort(t *testing.T) {
	const many = 5*look + 10 // at once
	large := ring
	large.QueueBytes = 1 << 20
	// queue sends what says nothing, and then something.
	queue := func(p *raw, typ byte, body ...byte) {
		p.t.Helper()
		for range many {
			if !p.send(tPong, 0) {
				p.t.Fatal("no room")
			}
		}
		p.send(typ, 0, body...)
	}
	soon := func(t *testing.T, began time.Time) {
		t.Helper()
		if took := time.Since(began); took > 2*latency {
			t.Errorf("it took %v, with a latency of %v", took, latency)
		}
	}
	t.Run("a Read", func(t *testing.T) {
		inBubble(t, func(t *testing.T) {
			s, _, p := negotiated(t, large, session.Config{})
			queue(p, tData, 'x')
			pass(2 * latency) // all is there before the janitor's first tick
			began := time.Now()
			readFull(t, s, 1)
			soon(t, began)
		})
	})
	t.Run("a Read that waits", func(t *testing.T) {
		inBubble(t, func(t *testing.T) {
			s, _, p := negotiated(t, large, session.Config{})
			r := goRead(s, make([]byte, 1))
			pass(time.Second)
			began := time.Now()
			queue(p, tData, 'x')
			if x := within(t, r); x.n != 1 || x.err != nil {
				t.Errorf("Read: %+v", x)
			}
			soon(t, began)
		})
	})
	t.Run("a Write that waits for credit", func(t *testing.T) {
		inBubble(t, func(t *testing.T) {
			cfg := messages
			cfg.Limits.Window, cfg.SendQueue = 2*many, 2*many
			s, _, p := rawPair(t, cfg, session.Config{KeepAlive: -1, SendBudget: 1})
			p.expect(tNegotiate)
			p.dropped = 0
			const credits = 16
			p.send(tNegotiate, 0, parameters(1, credits, uint32(cfg.Limits.MaxMessage), 3)...)
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
			sent := credits - uint32(session.ControlReserve) // all that it could
			queue(p, tPong)
			p.dropped = sent
			p.send(tCredit, 0)
			if x := within(t, w); x.n != len(data) || x.err != nil {
				t.Errorf("Write: %+v", x)
			}
			soon(t, began)
		})
	})
	t.Run("nobody", func(t *testing.T) {
		inBubble(t, func(t *testing.T) {
			_, _, p := negotiated(t, large, session.Config{})
			pass(time.Second)
			queue(p, tPing)
			p.expect(tPong)
		})
	})
}
