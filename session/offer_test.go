package session_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/session"
	"github.com/sanconn/san/session/twin"
)

// An offer that the peer refuses ends short: the rest comes as payload, in order.
func TestRefusedOffer(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, byRead, session.Config{KeepAlive: -1})
		data := pattern(20_000)
		w := goWrite(s, data)
		b := p.expect(tOfferRead)
		id, first := uint64(le.Uint32(b)), bytes.Clone(b[32:])
		p.send(tRefuse, 0, u64(id)...)
		if b := p.expect(tCancelRead); uint64(le.Uint32(b)) != id {
			t.Fatalf("it takes %d back instead of %d", le.Uint32(b), id)
		}
		behind := goWrite(s, []byte("behind")) // nothing may come before the answer
		if m := p.recv(); m != nil && m[0] != tCredit {
			t.Fatalf("a message of type %d", m[0])
		}
		p.send(tReadDone, 0, u64(id, 5000)...)
		rest := data[len(first)+5000:]
		if got := p.data(len(rest) + 6); !bytes.Equal(got, append(bytes.Clone(rest), "behind"...)) {
			t.Error("wrong bytes")
		}
		for _, r := range []result{within(t, w), within(t, behind)} {
			if r.err != nil {
				t.Errorf("Write: %+v", r)
			}
		}
	})
}

// An offer to a session that does not read, or is reading it, which is taken back.
func TestOfferTakenBack(t *testing.T) {
	for _, reading := range []int{0, 10} {
		t.Run(fmt.Sprint(reading), func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				s, _, p := negotiated(t, byRead, session.Config{KeepAlive: -1, ReceiveBudget: 1})
				data := pattern(40_000)
				d, err := p.Expose(data, session.RemoteRead)
				if err != nil {
					t.Fatal(err)
				}
				p.send(tOfferRead, 0, append(u64(1, d.Addr, d.Key, d.Len), "payload"...)...)
				pass(time.Second)
				begin := readFull(t, s, reading)
				p.send(tCancelRead, 0, u64(1)...)
				count := int(le.Uint64(p.expectDone(t, 1, 0)))
				if count == 0 || count >= len(data) {
					t.Errorf("%d bytes of an offer for which there is no budget", count)
				}
				p.send(tData, 0, []byte("rest")...)
				want := "payload" + string(data[:count]) + "rest"
				if got := append(begin, readFull(t, s, len(want)-reading)...); string(got) != want {
					t.Error("wrong bytes")
				}
				p.send(tShutdown, 0)
				_, err = s.Read(make([]byte, 1))
				wantErr(t, "Read", err, io.EOF)
				p.send(tClose, 0)
				pass(time.Second)
				go s.Close()
				p.expect(tCloseAck)
				p.expect(tClose)
			})
		})
	}
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

// A Write that is interrupted behind bytes in the outbox returns what the peer
// will have.
func TestInterruptedBehindTheOutbox(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, b, _, _ := pair(t, boxed, session.Config{ReceiveBudget: 50_000, SendBudget: 50_000, Threshold: -1})
		data := pattern(400_000)
		writeAll(t, a, data[:60_000], 20_000)
		w := goWrite(a, bytes.Clone(data[60_000:]))
		pass(time.Second)
		a.InterruptWrite(true)
		r := within(t, w)
		wantErr(t, "Write", r.err, session.ErrInterrupted)
		a.InterruptWrite(false)
		rest := data[60_000+r.n:]
		w = goWrite(a, rest)
		if got := readFull(t, b, len(data)); !bytes.Equal(got, data) {
			t.Errorf("the stream went on at another place than %d", r.n)
		}
		if r := within(t, w); r.n != len(rest) || r.err != nil {
			t.Errorf("Write: %+v", r)
		}
	})
}

// A peer that has its grants wrong costs the connection.
func TestBrokenRulesOfGrants(t *testing.T) {
	for name, say := range map[string]func(*session.Session, *raw){
		"granted while a grant is out": func(s *session.Session, p *raw) {
			goWrite(s, pattern(20_000))
			id := uint64(le.Uint32(p.expect(tOfferWrite)))
			for range 2 {
				d, _ := p.Expose(make([]byte, 1000), session.RemoteWrite)
				p.send(tGrant, 0, u64(id, d.Addr, d.Key, d.Len)...)
			}
		},
		"written though the grant is over": func(_ *session.Session, p *raw) {
			p.send(tOfferWrite, 0, u64(1, 100_000)...)
			size := le.Uint64(p.expect(tGrant)[24:])
			p.send(tWriteDone, 0, u64(1, size)...)
			p.send(tWriteDone, 0, u64(1, 1)...)
		},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				s, e, p := negotiated(t, byWrite, session.Config{KeepAlive: -1, ReceiveBudget: 1, Disable: session.FeatureRDMARead})
				e.Hold(twin.HoldWrites)
				say(s, p)
				pass(time.Second)
				_, err := s.WriteUrgent([]byte("alive?"))
				wantErr(t, "the connection", err, syscall.ECONNRESET)
			})
		})
	}
}

// Rules of an open offer.
func TestBrokenRulesOfOffers(t *testing.T) {
	// hold makes an offer of memory that exists, and whose reads do not end.
	hold := func(p *raw, id uint64) {
		d, _ := p.Expose(make([]byte, 50_000), session.RemoteRead)
		p.send(tOfferRead, 0, u64(id, d.Addr, d.Key, d.Len)...)
	}
	both := byRead
	both.Limits.CanWrite = true
	for name, tt := range map[string]struct {
		write int
		say   func(*raw)
	}{
		"another offer":        {0, func(p *raw) { hold(p, 1); hold(p, 2) }},
		"data behind an offer": {0, func(p *raw) { hold(p, 1); p.send(tData, 0, 1) }},
		"a Fill behind it":     {0, func(p *raw) { p.ask(); hold(p, 1); p.send(tFill, 0, u64(1)...) }},
		"close behind it":      {0, func(p *raw) { hold(p, 1); p.send(tClose, 0) }},
		"offers of both kinds": {0, func(p *raw) { hold(p, 1); p.send(tOfferWrite, 0, u64(7, 100)...) }},
		"short, not cancelled": {20_000, func(p *raw) { p.send(tReadDone, 0, u64(uint64(le.Uint32(p.expect(tOfferRead))), 3)...) }},
		"more than offered":    {20_000, func(p *raw) { p.send(tReadDone, 0, u64(uint64(le.Uint32(p.expect(tOfferRead))), 20_001)...) }},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				s, e, p := negotiated(t, both, session.Config{KeepAlive: -1})
				e.Hold(twin.HoldReads)
				if tt.write > 0 {
					goWrite(s, make([]byte, tt.write))
				}
				tt.say(p)
				pass(time.Second)
				_, err := s.WriteUrgent([]byte("alive?"))
				wantErr(t, "the connection", err, syscall.ECONNRESET)
			})
		})
	}
}

// A WriteDone of what was never written shows zeros, and not what other connections
// have left in that memory.
func TestWriteDoneThatLies(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, byWrite, session.Config{KeepAlive: -1})
		p.send(tOfferWrite, 0, u64(1, 1000)...)
		if size := le.Uint64(p.expect(tGrant)[24:]); size != 1000 { // nobody reads: of a chunk
			t.Fatalf("a grant of %d bytes", size)
		}
		p.send(tWriteDone, 0, u64(1, 1000)...)
		if got := readFull(t, s, 1000); changed(got, 0) >= 0 {
			t.Errorf("it shows %x…", got[:8])
		}
	})
}

// slowRevoke has time pass before Revoke returns.
type slowRevoke struct {
	session.Memory
	began chan struct{} // a token for each
}

func (e slowRevoke) Revoke(d session.Descriptor) {
	e.Memory.Revoke(d)
	e.began <- struct{}{}
	nap(time.Second)
}

// What a Read that waits for its own transfer has to say, and finds no room or no
// credit for, goes as soon as there is some: nobody else looks at the session.
func TestControlOfADirectReadGoesLater(t *testing.T) {
	cfg := byWrite
	cfg.SendQueue = session.ControlReserve + 1
	ask := func(p *raw, questions int) {
		for range questions {
			p.send(tPing, 0)
			pass(time.Millisecond)
		}
	}
	answered := func(p *raw, questions int) {
		for range questions {
			p.expect(tPong)
		}
	}
	for name, exhaust := range map[string]func(*raw) (again func()){
		"room": func(p *raw) func() {
			p.Hold(twin.HoldMessages) // what is under way to the peer stays in the session's queue
			ask(p, cfg.SendQueue)
			return func() { p.Hold(0); answered(p, cfg.SendQueue) }
		},
		"credit": func(p *raw) func() {
			credits := cfg.Limits.Window - session.ControlReserve
			ask(p, credits)
			return func() { answered(p, credits); p.send(tCredit, 0) }
		},
	} {
		const size = 200_000
		// begin has the session read, and nobody else look at it.
		begin := func(t *testing.T) (*session.Session, *raw, []byte, <-chan result) {
			t.Helper()
			s, _, p := negotiated(t, cfg, session.Config{KeepAlive: -1})
			into := make([]byte, size)
			r := goRead(s, into)
			pass(time.Second)
			return s, p, into, r
		}
		soon := func(t *testing.T, p *raw, typ byte, again func()) []byte {
			t.Helper()
			pass(time.Second)
			began := time.Now()
			again()
			b := p.expect(typ)
			if took := time.Since(began); took > time.Millisecond {
				t.Errorf("it came %v after there was some", took)
			}
			return b
		}
		t.Run("Grant without "+name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				_, p, into, r := begin(t)
				again := exhaust(p)
				p.send(tOfferWrite, 0, u64(1, size)...)
				b := soon(t, p, tGrant, again)
				d := session.Descriptor{Addr: le.Uint64(b[8:]), Key: le.Uint64(b[16:]), Len: le.Uint64(b[24:])}
				if d.Len != size {
					t.Fatalf("a grant of %d bytes, want the slice of the Read", d.Len)
				}
				if err := p.Write(pattern(size), d, 0, 1); err != nil {
					t.Fatal(err)
				}
				p.send(tWriteDone, 0, u64(1, size)...)
				if x := within(t, r); x.n != size || x.err != nil || !bytes.Equal(into, pattern(size)) {
					t.Errorf("Read: %+v", x)
				}
			})
		})
		t.Run("CancelWrite without "+name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				s, p, _, r := begin(t)
				p.send(tOfferWrite, 0, u64(1, size)...)
				p.expect(tGrant)
				again := exhaust(p)
				s.InterruptRead(true)
				soon(t, p, tCancelWrite, again)
				p.send(tWriteDone, 0, u64(1, 0)...)
				if x := within(t, r); x.n != 0 || !errors.Is(x.err, session.ErrInterrupted) {
					t.Errorf("Read: %+v", x)
				}
			})
		})
	}
}

// Credit that a Read owes for what it took before a transfer to its own slice does not
// wait for the end of that.
func TestCreditOfADirectRead(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		cfg := byRead
		cfg.SendQueue = 40
		s, e, p := negotiated(t, cfg, session.Config{KeepAlive: -1})
		data := pattern(100_000)
		d, err := p.Expose(data, session.RemoteRead)
		if err != nil {
			t.Fatal(err)
		}
		r := goRead(s, make([]byte, 200_000))
		pass(time.Second)
		e.Hold(twin.HoldReads)
		const before = 10
		for range before { // all of it comes at once
			p.send(tData, 0, 'x')
		}
		p.send(tOfferRead, 0, u64(1, d.Addr, d.Key, d.Len)...)
		p.expect(tCredit)
		select {
		case x := <-r:
			t.Fatalf("Read, with a transfer under way: %+v", x)
		default:
		}
		e.Hold(0)
		if x := within(t, r); x.n != before+len(data) || x.err != nil {
			t.Errorf("Read: %+v", x)
		}
	})
}

// atOnce is memory whose RDMA reads are over when Read returns.
type atOnce struct{ session.Memory }

func (e atOnce) Read(into []byte, from session.Descriptor, off int, id uint32) error {
	err := e.Memory.Read(into, from, off, id)
	nap(2 * latency)
	return err
}

// … nor, if that is over in the same look, for the janitor.
func TestCreditOfADirectReadThatIsOverAtOnce(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		cfg := byRead
		cfg.SendQueue = 40
		s, _, p := negotiatedOn(t, cfg, session.Config{KeepAlive: -1, ReceiveBudget: 1}, withMemory(func(m session.Memory) session.Memory {
			return atOnce{m}
		}))
		const before, direct = 10, 256 << 10 // half of the offer, so that nothing else is to be said
		d, err := p.Expose(make([]byte, 2*direct), session.RemoteRead)
		if err != nil {
			t.Fatal(err)
		}
		for range before {
			p.send(tData, 0, 'x')
		}
		p.send(tOfferRead, 0, u64(1, d.Addr, d.Key, d.Len)...)
		p.send(tPong, 0) // so that a Read goes on to the offer
		pass(2 * latency)
		if n, err := s.Read(make([]byte, before+direct)); n != before+direct || err != nil {
			t.Fatalf("Read: %d, %v", n, err)
		}
		began := time.Now()
		p.expect(tCredit)
		if took := time.Since(began); took > time.Millisecond {
			t.Errorf("it came %v after the Read", took)
		}
	})
}

// What does not go to the slice of a Read is fetched ahead, though nobody reads behind
// that: the peer's Write ends.
func TestOfferEndsBehindADirectRead(t *testing.T) {
	for name, cfg := range map[string]twin.Config{"by read": byRead, "by write": byWrite} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				a, b, _, _ := pair(t, cfg, session.Config{})
				data, into := pattern(1<<20), make([]byte, 300_000)
				r := goRead(b, into)
				pass(time.Second)
				w := goWrite(a, data)
				x := within(t, r)
				if x.err != nil {
					t.Fatal(x.err)
				}
				if y := within(t, w); y.n != len(data) || y.err != nil {
					t.Errorf("Write: %+v", y)
				}
				if got := append(into[:x.n:x.n], readFull(t, b, len(data)-x.n)...); !bytes.Equal(got, data) {
					t.Error("wrong bytes")
				}
			})
		})
	}
}

// fullQueue is an endpoint on which RDMA reads find the queue full until there is room.
type fullQueue struct {
	*twin.Endpoint
	room  atomic.Bool
	armed atomic.Uint32 // session.Events
	waker session.Waker
}

func (e *fullQueue) Start(w session.Waker) {
	e.waker = w
	e.Endpoint.Start(w)
}

func (e *fullQueue) Arm(ev session.Events) {
	e.armed.Or(uint32(ev))
	e.Endpoint.Arm(ev)
}

func (e *fullQueue) Memory() session.Memory { return fullMemory{e.Endpoint.Memory(), e} }

type fullMemory struct {
	session.Memory
	e *fullQueue
}

func (m fullMemory) Read(into []byte, from session.Descriptor, off int, id uint32) error {
	if !m.e.room.Load() {
		return session.ErrWouldBlock
	}
	return m.Memory.Read(into, from, off, id)
}

// A Read whose transfer finds no room in the queue waits for room.
func TestDirectReadWaitsForRoom(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		e := &fullQueue{}
		s, _, p := negotiatedOn(t, byRead, session.Config{}, func(under *twin.Endpoint) session.Endpoint {
			e.Endpoint = under
			return e
		})
		data, into := pattern(100_000), make([]byte, 100_000)
		d, err := p.Expose(data, session.RemoteRead)
		if err != nil {
			t.Fatal(err)
		}
		r := goRead(s, into)
		pass(time.Second)
		p.send(tOfferRead, 0, u64(1, d.Addr, d.Key, d.Len)...)
		pass(time.Second)
		e.room.Store(true)
		if session.Events(e.armed.Load())&session.SendReady != 0 {
			go e.waker.Wake(session.SendReady)
		}
		if x := within(t, r); x.n != len(data) || x.err != nil || !bytes.Equal(into, data) {
			t.Errorf("Read: %+v", x)
		}
	})
}

// A Read that Abort ends in the middle of its transfers has what had arrived.
func TestAbortInTheMiddleOfADirectRead(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		cfg := byRead
		cfg.Limits.MaxRDMA = 10_000
		s, e, p := negotiated(t, cfg, session.Config{})
		data, into := pattern(200_000), make([]byte, 300_000)
		d, err := p.Expose(data, session.RemoteRead)
		if err != nil {
			t.Fatal(err)
		}
		r := goRead(s, into)
		pass(time.Second)
		const before = "before "
		p.send(tData, 0, []byte(before)...)
		p.send(tOfferRead, 0, u64(1, d.Addr, d.Key, d.Len)...)
		p.send(tPong, 0)
		pass(5 * latency / 2) // the first reads are over, the next under way
		e.Hold(twin.HoldReads)
		pass(time.Second)
		s.Abort()
		x := within(t, r)
		want := append([]byte(before), data...)
		moved := x.n - len(before)
		if moved <= 0 || moved >= len(data) || moved%cfg.Limits.MaxRDMA != 0 || x.err != nil || !bytes.Equal(into[:x.n], want[:x.n]) {
			t.Errorf("Read: %+v", x)
		}
		_, err = s.Read(into)
		wantErr(t, "the next Read", err, session.ErrClosed)
	})
}

// A Write that is offered in pieces says so, and is cut if the peer's process ends
// between them.
func TestDeathBetweenOffers(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		cfg := byRead
		cfg.Limits.MaxExpose = 50_000
		a, b, ea, _ := pair(t, cfg, session.Config{ReceiveBudget: 1})
		goWrite(a, pattern(100_000))
		readFull(t, b, 51_024) // one offer, with what came in its message
		ea.Kill()
		got, err := io.ReadAll(readerOf(b))
		wantErr(t, "Read", err, syscall.ECONNRESET)
		if len(got) >= 49_000 {
			t.Errorf("%d bytes more were read", len(got))
		}
	})
}

// narrow is an endpoint that has room for short messages alone.
type narrow struct {
	*twin.Endpoint
	most atomic.Int32 // bytes; 0: as ever
}

func (e *narrow) Reserve(lo, hi int) []byte {
	if most := int(e.most.Load()); most > 0 && lo > most {
		return nil
	}
	return e.Endpoint.Reserve(lo, hi)
}

// What takes less room stays behind what waits for more: the message of an offer, and a
// Fill.
func TestShortMessagesStayBehind(t *testing.T) {
	for name, tt := range map[string]struct {
		cfg  twin.Config
		size int
	}{"an offer": {byRead, 50_000}, "a Fill": {boxed, 20_000}} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				e := &narrow{}
				s, _, p := negotiatedOn(t, tt.cfg, session.Config{}, func(under *twin.Endpoint) session.Endpoint {
					e.Endpoint = under
					return e
				})
				if tt.cfg.Limits.Inbox > 0 {
					p.open(s, 100_000)
				}
				e.most.Store(1500)
				first := pattern(5000)
				writeAll(t, s, first, len(first)) // waits here
				goWrite(s, pattern(tt.size))
				pass(time.Second / 2)
				p.send(tUrgent, 0, 'u') // it looks again
				if m := p.recv(); m != nil {
					t.Fatalf("a message of type %d", m[0])
				}
				e.most.Store(0)
				p.send(tUrgent, 0, 'u')
				if got := p.data(len(first)); !bytes.Equal(got, first) {
					t.Error("wrong bytes")
				}
			})
		})
	}
}

// An offer stays behind what the outbox could not send.
func TestOfferBehindTheOutbox(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, boxed, session.Config{})
		in := p.open(s, 10_000)
		writeAll(t, s, pattern(20_000), 20_000)
		goWrite(s, pattern(100_000))
		in.read(10_000)
		if m := p.recv(); m != nil {
			t.Fatalf("a message of type %d before the outbox is empty", m[0])
		}
		in.emptied()
		in.read(10_000)
		p.expect(tOfferRead)
	})
}

// Memory of a Write is taken back once, however often that looks.
func TestOfferIsTakenBackOnce(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, byRead, session.Config{})
		w := goWrite(s, pattern(50_000))
		id := uint64(le.Uint32(p.expect(tOfferRead)))
		s.InterruptWrite(true)
		p.expect(tCancelRead)
		for range 5 {
			p.send(tUrgent, 0, 'u')
			pass(time.Millisecond)
		}
		p.send(tReadDone, 0, u64(id, 0)...)
		wantErr(t, "Write", within(t, w).err, session.ErrInterrupted)
		if m := p.recv(); m != nil {
			t.Errorf("a message of type %d", m[0])
		}
	})
}

// The reader of an offer that is taken back answers when its reads are over, and not
// before: the memory is gone then.
func TestOfferTakenBackWhileItIsRead(t *testing.T) {
	for name, reading := range map[string]bool{"by a Read": true, "ahead": false} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				s, e, p := negotiated(t, byRead, session.Config{})
				data, into := pattern(100_000), make([]byte, 100_000)
				d, err := p.Expose(data, session.RemoteRead)
				if err != nil {
					t.Fatal(err)
				}
				e.Hold(twin.HoldReads)
				var r <-chan result
				if reading {
					r = goRead(s, into)
					pass(time.Second)
				}
				p.send(tOfferRead, 0, u64(1, d.Addr, d.Key, d.Len)...)
				pass(time.Second)
				p.send(tCancelRead, 0, u64(1)...)
				if m := p.recv(); m != nil && m[0] != tCredit {
					t.Fatalf("a message of type %d", m[0])
				}
				e.Hold(0)
				n := int(le.Uint64(p.expectDone(t, 1, 0)))
				if !reading {
					r = goRead(s, into)
				}
				if x := within(t, r); x.n != n || x.err != nil || !bytes.Equal(into[:n], data[:n]) {
					t.Errorf("Read: %+v; the peer was told of %d", x, n)
				}
			})
		})
	}
}

// What was to be fetched ahead from an offer that was withdrawn leaves nothing behind that
// the next bytes would wait for.
func TestWithdrawnBeforeItIsFetchedAhead(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		e := &fullQueue{}
		s, _, p := negotiatedOn(t, byRead, session.Config{}, func(under *twin.Endpoint) session.Endpoint {
			e.Endpoint = under
			return e
		})
		d, err := p.Expose(make([]byte, 100_000), session.RemoteRead)
		if err != nil {
			t.Fatal(err)
		}
		p.send(tOfferRead, 0, u64(1, d.Addr, d.Key, d.Len)...)
		pass(time.Second)
		p.send(tCancelRead, 0, u64(1)...)
		if n := le.Uint64(p.expectDone(t, 1, 0)); n != 0 {
			t.Errorf("%d bytes were fetched", n)
		}
		p.send(tData, 0, []byte("behind")...)
		if got := readFull(t, s, 6); string(got) != "behind" {
			t.Errorf("%q", got)
		}
		if left := e.Left(); left.Allocated != 0 {
			t.Errorf("kept: %+v", left)
		}
	})
}

// A Read that is interrupted stops soon: what is under way is waited for, no more is begun.
func TestInterruptedReadStopsSoon(t *testing.T) {
	for name, cfg := range map[string]twin.Config{"by read": byRead, "by write": byWrite} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				const size = 8 << 20
				cfg.Limits.MaxRDMA = 10_000
				a, b, _, _ := pair(t, cfg, session.Config{})
				r := goRead(b, make([]byte, size))
				pass(time.Second)
				goWrite(a, pattern(size))
				pass(20 * latency)
				b.InterruptRead(true)
				began := time.Now()
				if x := within(t, r); x.n == 0 || x.n >= size || x.err != nil {
					t.Errorf("Read: %+v", x)
				}
				if took := time.Since(began); took > 20*latency {
					t.Errorf("it returned %v later", took)
				}
			})
		})
	}
}

// grant takes a Grant, and returns where to write.
func (p *raw) grant() session.Descriptor { return descriptor(p.expect(tGrant)[8:]) }

// The memory of a Read goes back and forth: a grant that is given back unused costs
// nothing, one that is used in part is followed by one of the rest.
func TestGrantsOfARead(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		const size, part = 100_000, 40_000
		cfg := byWrite
		cfg.Limits.MaxExpose = 60_000
		s, _, p := negotiated(t, cfg, session.Config{})
		data, into := pattern(size), make([]byte, size)
		r := goRead(s, into)
		pass(time.Second)
		p.send(tOfferWrite, 0, u64(1, size)...)
		p.grant()
		s.InterruptRead(true)
		p.expect(tCancelWrite)
		p.send(tWriteDone, 0, u64(1, 0)...)
		wantErr(t, "Read", within(t, r).err, session.ErrInterrupted)
		s.InterruptRead(false)
		// write uses each grant in part, and checks what the Reads have.
		write := func(id uint64) {
			t.Helper()
			for at := 0; at < size; {
				d := p.grant()
				n := min(part, int(d.Len))
				if err := p.Write(data[at:at+n], d, 0, 1); err != nil {
					t.Fatal(err)
				}
				pass(time.Millisecond)
				for p.Poll(&session.Event{}) { // the completion
				}
				at += n
				p.send(tWriteDone, 0, u64(id, uint64(n))...)
			}
			for got := 0; got < size; {
				x := within(t, r)
				if x.err != nil {
					t.Fatal(x.err)
				}
				if got += x.n; got < size {
					r = goRead(s, into[got:])
				}
			}
			if !bytes.Equal(into, data) {
				t.Errorf("wrong bytes of offer %d", id)
			}
		}
		r = goRead(s, into) // too late: memory of the session's own is granted
		write(1)
		clear(into)
		r = goRead(s, into)
		pass(time.Second)
		p.send(tOfferWrite, 0, u64(2, size)...)
		write(2)
		// … and CloseRead takes it back.
		p.send(tOfferWrite, 0, u64(3, size)...)
		p.grant()
		go s.CloseRead()
		p.expect(tCancelWrite)
		p.send(tWriteDone, 0, u64(3, 0)...)
		p.expect(tGrant) // of nothing
		if _, err := s.WriteUrgent([]byte("alive?")); err != nil {
			t.Error(err)
		}
	})
}

// A peer that takes its grant back, or is too late to, may give the next one.
func TestGrantsOfThePeer(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		cfg := byWrite
		cfg.Limits.MaxRDMA, cfg.RDMAQueue = 10_000, 2
		s, e, p := negotiated(t, cfg, session.Config{Disable: session.FeatureRDMARead})
		const size = 200_000
		data := pattern(size)
		w := goWrite(s, data)
		o := p.expect(tOfferWrite)
		id, got := uint64(le.Uint32(o)), bytes.Clone(o[16:])
		left := int(le.Uint64(o[8:]))
		for i := 0; left > 0; i++ {
			mem := make([]byte, min(50_000, left))
			d, err := p.Expose(mem, session.RemoteWrite)
			if err != nil {
				t.Fatal(err)
			}
			if i == 0 {
				e.Hold(twin.HoldWrites)
			}
			p.send(tGrant, 0, u64(id, d.Addr, d.Key, d.Len)...)
			if i == 0 {
				pass(time.Millisecond)
				p.send(tCancelWrite, 0, u64(id)...)
				pass(time.Millisecond)
				e.Hold(0)
			}
			n := int(le.Uint64(p.expect(tWriteDone)[8:]))
			if n == 0 || i == 0 && n == len(mem) {
				t.Fatalf("%d bytes of grant %d", n, i)
			}
			p.Revoke(d)
			if i == 1 {
				p.send(tCancelWrite, 0, u64(id)...) // too late
				pass(time.Millisecond)
			}
			got, left = append(got, mem[:n]...), left-n
		}
		if x := within(t, w); x.n != size || x.err != nil || !bytes.Equal(got, data) {
			t.Errorf("Write: %+v", x)
		}
	})
}

// Ids of offers begin anew behind the last one, without that of an inbox's writes.
func TestIDsOfOffersGoRound(t *testing.T) {
	for last, want := range map[uint32]uint32{0: 1, math.MaxUint32 - 1: math.MaxUint32, math.MaxUint32: 1} {
		inBubble(t, func(t *testing.T) {
			s, _, p := negotiated(t, byRead, session.Config{})
			s.LastOffer(last)
			goWrite(s, pattern(20_000))
			if id := le.Uint32(p.expect(tOfferRead)); id != want {
				t.Errorf("behind %d comes %d", last, id)
			}
		})
	}
}

// noControl has no room for control messages until the session has asked for some once
// more: between that and its asking for data's, the device has got on.
type noControl struct {
	*twin.Endpoint
	full, once bool
}

func (e *noControl) ReserveControl(n int) []byte {
	if e.full {
		e.full = !e.once
		return nil
	}
	return e.Endpoint.ReserveControl(n)
}

// The end of an offer that was cut waits for room: nothing of the stream overtakes it.
func TestNothingOvertakesTheEndOfAnOffer(t *testing.T) {
	for name, next := range map[string]func(*session.Session) error{
		"Write":      func(s *session.Session) error { _, err := s.Write([]byte("next")); return err },
		"CloseWrite": func(s *session.Session) error { return s.CloseWrite() },
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				ea, eb := twins(t, byWrite)
				w := &noControl{Endpoint: ea}
				a, b := session.New(w, session.Config{KeepAlive: -1}), session.New(eb, session.Config{KeepAlive: -1, ReceiveBudget: 1})
				t.Cleanup(func() {
					for _, s := range []*session.Session{a, b} {
						s.Abort()
						<-s.Closed()
					}
					idle()
				})
				negotiate(t, a)
				negotiate(t, b)
				eb.Hold(twin.HoldMessages) // the offer is on its way
				r := goWrite(a, pattern(100_000))
				pass(time.Millisecond)
				w.full = true
				a.InterruptWrite(true)
				cut := within(t, r)
				wantErr(t, "Write", cut.err, session.ErrInterrupted)
				a.InterruptWrite(false)
				w.once = true
				if err := next(a); err != nil {
					t.Fatal(err)
				}
				pass(time.Millisecond)
				eb.Hold(0)
				readFull(t, b, cut.n)
				if name == "CloseWrite" {
					_, err := b.Read(make([]byte, 1))
					wantErr(t, "Read", err, io.EOF)
				} else if got := readFull(t, b, 4); string(got) != "next" {
					t.Errorf("behind the Write that was cut comes %q", got)
				}
			})
		})
	}
}
