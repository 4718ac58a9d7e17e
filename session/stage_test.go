package session_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sanconn/san/session"
	"github.com/sanconn/san/session/twin"
)

// offerOf is what an OfferRead's body says.
type offerOf struct {
	id     uint64
	d      session.Descriptor
	offset int
	n      int
}

func (p *raw) offer() offerOf {
	p.t.Helper()
	b := p.expect(tOfferRead)
	o := offerOf{
		id: uint64(le.Uint32(b)), offset: int(le.Uint32(b[4:])),
		d: session.Descriptor{Addr: le.Uint64(b[8:]), Key: le.Uint64(b[16:]), Len: le.Uint64(b[24:])},
	}
	o.n = int(o.d.Len) - o.offset
	return o
}

// read reads what is offered.
func (p *raw) read(o offerOf) []byte {
	p.t.Helper()
	b := make([]byte, o.n)
	if err := p.Read(b, o.d, o.offset, 1); err != nil {
		p.t.Fatal(err)
	}
	for range 1000 {
		var ev session.Event
		if p.Poll(&ev) {
			if ev.Kind != session.ReadDone || ev.Err != nil {
				p.t.Fatalf("%+v", ev)
			}
			return b
		}
		time.Sleep(100 * time.Microsecond)
	}
	p.t.Fatal("the read does not end")
	return nil
}

func (p *raw) data(n int) (b []byte) {
	p.t.Helper()
	for len(b) < n {
		b = append(b, p.expect(tData)...)
		p.send(tCredit, 0)
	}
	return b
}

// writeAll writes data in Writes of size bytes that must not wait.
func writeAll(t *testing.T, s *session.Session, data []byte, size int) {
	t.Helper()
	for len(data) > 0 {
		n := min(size, len(data))
		if r := within(t, goWrite(s, bytes.Clone(data[:n]))); r.n != n || r.err != nil {
			t.Fatalf("Write: %+v", r)
		}
		data = data[n:]
	}
}

// D8: Writes of moderate size return at once, and their offers are open
// together.
func TestStagedOffersAreOpenTogether(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, staged, session.Config{KeepAlive: -1, SendBudget: 256 << 10})
		data := pattern(11 * 20_000)
		writeAll(t, s, data, 20_000)
		var offers []offerOf
		var got []byte
		// Two of a Write each, then of an eighth of the ring; too little waits.
		for _, n := range []int{1, 1, 2, 2, 2, 2} {
			o := p.offer()
			if o.n != n*20_000 {
				t.Errorf("an offer of %d bytes, want %d", o.n, n*20_000)
			}
			offers = append(offers, o)
		}
		for _, o := range offers {
			got = append(got, p.read(o)...)
		}
		if m := p.recv(); m != nil && m[0] != tCredit {
			t.Errorf("a message of type %d behind the open offers", m[0])
		}
		p.send(tReadDone, 0, u64(offers[5].id, uint64(offers[5].n))...) // of all of them
		last := p.offer()
		if got = append(got, p.read(last)...); !bytes.Equal(got, data) {
			t.Error("wrong bytes")
		}
		writeAll(t, s, data[:20_000], 20_000)
		writeAll(t, s, data[:100], 100)
		if o := p.offer(); o.n != 20_000 {
			t.Errorf("an offer of %d bytes", o.n)
		} else {
			p.send(tReadDone, 0, u64(o.id, uint64(o.n))...)
		}
		if got := p.data(100); !bytes.Equal(got, data[:100]) { // too little for an offer
			t.Error("wrong bytes")
		}
	})
}

// Where exposing memory costs as much as the copy, Writes above the threshold are
// staged as well; but not if a threshold was asked for, nor beyond StageTo.
func TestStageTo(t *testing.T) {
	dear := staged
	dear.Limits.StageTo = 128 << 10
	for _, tt := range []struct {
		size, threshold int
		own             bool // its memory, not a copy
	}{
		{100_000, 0, false},
		{100_000, 64 << 10, true},
		{128 << 10, 0, true},
	} {
		t.Run(fmt.Sprint(tt.size, " ", tt.threshold), func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				s, _, p := negotiated(t, dear, session.Config{KeepAlive: -1, Threshold: tt.threshold})
				w := goWrite(s, pattern(tt.size))
				p.offer()
				synctest.Wait()
				waits := true
				select {
				case <-w:
					waits = false // it has been copied
				default:
				}
				if waits != tt.own {
					t.Errorf("offers the Write's own memory: %v", waits)
				}
				s.Abort()
			})
		})
	}
}

// An offer that the peer refuses ends short, and those behind it do not count:
// all of it comes as payload, in order.
func TestRefusedOffer(t *testing.T) {
	for name, over := range map[string]int{"the first": 0, "the third": 2} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				s, _, p := negotiated(t, staged, session.Config{KeepAlive: -1, SendBudget: 80_000})
				data := pattern(4 * 20_000)
				writeAll(t, s, data, 20_000)
				var offers []offerOf
				for range 4 {
					offers = append(offers, p.offer())
				}
				if over > 0 {
					p.send(tReadDone, 0, u64(offers[over-1].id, 20_000)...)
				}
				o := offers[over]
				p.send(tRefuse, 0, u64(o.id)...)
				if b := p.expect(tCancelRead); uint64(le.Uint32(b)) != o.id {
					t.Fatalf("it takes %d back instead of %d", le.Uint32(b), o.id)
				}
				w := goWrite(s, []byte("behind")) // nothing may come before the answer
				if m := p.recv(); m != nil && m[0] != tCredit {
					t.Fatalf("a message of type %d", m[0])
				}
				p.send(tReadDone, 0, u64(o.id, 5000)...)
				rest := data[over*20_000+5000:]
				if got := p.data(len(rest) + 6); !bytes.Equal(got, append(bytes.Clone(rest), "behind"...)) {
					t.Error("wrong bytes")
				}
				if r := within(t, w); r.n != 6 || r.err != nil {
					t.Errorf("Write: %+v", r)
				}
			})
		})
	}
}

// Several offers to a session that does not read, or is reading the first, which
// is taken back.
func TestOfferTakenBack(t *testing.T) {
	for _, reading := range []int{0, 10} {
		t.Run(fmt.Sprint(reading), func(t *testing.T) { takeOfferBack(t, reading) })
	}
}

func takeOfferBack(t *testing.T, reading int) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, byRead, session.Config{KeepAlive: -1, ReceiveBudget: 1})
		data := pattern(40_000)
		d, err := p.Expose(data, session.RemoteRead)
		if err != nil {
			t.Fatal(err)
		}
		offer := func(id uint64, from, to int) {
			p.send(tOfferRead, 0, append(u64(id|uint64(from)<<32, d.Addr, d.Key, uint64(to)), "payload"...)...)
		}
		offer(1, 0, 20_000)
		offer(2, 20_000, 30_000)
		offer(3, 30_000, 40_000)
		time.Sleep(time.Second)
		begin := readFull(t, s, reading)
		p.send(tCancelRead, 0, u64(2)...) // not begun: void
		if m := le.Uint64(p.expectDone(t, 2, 1)); m != 0 {
			t.Errorf("%d bytes of an offer that was not begun", m)
		}
		offer(4, 20_000, 40_000)
		p.send(tCancelRead, 0, u64(1)...)
		count := int(le.Uint64(p.expectDone(t, 1, 0)))
		if count == 0 || count >= 20_000 {
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
		time.Sleep(time.Second)
		go s.Close()
		p.expect(tCloseAck) // what was void was no unread data
		p.expect(tClose)
	})
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

// A Write that is interrupted while offers before it are open returns what the
// peer will have.
func TestInterruptedBehindOpenOffers(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, b, _, eb := pair(t, staged, session.Config{ReceiveBudget: 1})
		data := pattern(400_000)
		writeAll(t, a, data[:60_000], 20_000)
		eb.Hold(twin.HoldReads)
		w := goWrite(a, bytes.Clone(data[60_000:]))
		time.Sleep(time.Second)
		a.InterruptWrite(true)
		r := within(t, w)
		wantErr(t, "Write", r.err, session.ErrInterrupted)
		a.InterruptWrite(false)
		eb.Hold(0)
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

// What the ring of staged bytes held before is not shown to the peer.
func TestStagedMemoryIsClean(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, staged, session.Config{KeepAlive: -1})
		writeAll(t, s, bytes.Repeat([]byte{1}, 20_000), 20_000)
		o := p.offer()
		o.offset, o.n = 20_000, 100_000
		o.d.Len = 120_000
		if b := p.read(o); changed(b, 0) >= 0 {
			t.Error("not zero behind what was staged")
		}
	})
}

// A connection that does nothing gives the ring of staged bytes back, and gets
// another when it is used again.
func TestStagedMemoryOfAnIdleConnection(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, b, ea, eb := pair(t, staged, session.Config{ReceiveBudget: 1})
		data := pattern(50_000)
		for range 3 {
			writeAll(t, a, data, 20_000)
			if ea.Left().Exposed != 1 {
				t.Fatal("nothing is staged")
			}
			time.Sleep(time.Minute) // not read: it is needed
			if ea.Left().Exposed != 1 {
				t.Fatal("given back too early")
			}
			if got := readFull(t, b, len(data)); !bytes.Equal(got, data) {
				t.Error("wrong bytes")
			}
			time.Sleep(time.Minute)
			for _, e := range []*twin.Endpoint{ea, eb} {
				if left := e.Left(); left.Exposed != 0 || left.Allocated != 0 {
					t.Errorf("kept: %+v", left)
				}
			}
		}
	})
}

// Small Writes go as payload again once nothing is on offer.
func TestSmallWritesBehindStaged(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, b, _, _ := pair(t, staged, session.Config{})
		data := pattern(30_000)
		writeAll(t, a, data[:20_000], 20_000)
		writeAll(t, a, data[20_000:], 100)
		if got := readFull(t, b, len(data)); !bytes.Equal(got, data) {
			t.Error("wrong bytes")
		}
		time.Sleep(time.Second)
		before := a.Stats()
		writeAll(t, a, data[:100], 100)
		readFull(t, b, 100)
		if st := a.Stats(); st.OffersSent != before.OffersSent || before.OffersSent == 0 {
			t.Errorf("%d offers, then %d", before.OffersSent, st.OffersSent)
		}
	})
}

// Rules of offers that are open together.
func TestBrokenRulesOfOffers(t *testing.T) {
	desc := u64(1<<40, 7, 100_000)
	offer := func(p *raw, id uint64) { p.send(tOfferRead, 0, append(u64(id), desc...)...) }
	both := staged
	both.Limits.CanWrite = true
	for name, tt := range map[string]struct {
		write int
		say   func(*raw)
	}{
		"nine offers":          {0, func(p *raw) { hold(p, offer, 9) }},
		"data behind an offer": {0, func(p *raw) { hold(p, offer, 1); p.send(tData, 0, 1) }},
		"close behind offers":  {0, func(p *raw) { hold(p, offer, 2); p.send(tClose, 0) }},
		"offers of both kinds": {0, func(p *raw) { hold(p, offer, 1); p.send(tOfferWrite, 0, u64(7, 100)...) }},
		"an offset beyond":     {0, func(p *raw) { offer(p, 1|100_000<<32) }},
		"short, not cancelled": {20_000, func(p *raw) { p.send(tReadDone, 0, u64(p.offer().id, 3)...) }},
		"void, not cancelled":  {20_000, func(p *raw) { p.send(tReadDone, 1, u64(p.offer().id, 0)...) }},
		"more than offered":    {20_000, func(p *raw) { p.send(tReadDone, 0, u64(p.offer().id, 20_001)...) }},
		"void with bytes": {20_000, func(p *raw) {
			id := p.offer().id
			p.send(tRefuse, 0, u64(id)...)
			p.expect(tCancelRead)
			p.send(tReadDone, 1, u64(id, 5)...)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				s, e, p := negotiated(t, both, session.Config{KeepAlive: -1})
				e.Hold(twin.HoldReads)
				if tt.write > 0 {
					writeAll(t, s, make([]byte, tt.write), tt.write)
				}
				tt.say(p)
				time.Sleep(time.Second)
				_, err := s.WriteUrgent([]byte("alive?"))
				wantErr(t, "the connection", err, syscall.ECONNRESET)
			})
		})
	}
}

// hold makes n offers of memory that exists.
func hold(p *raw, _ func(*raw, uint64), n int) {
	d, _ := p.Expose(make([]byte, 50_000), session.RemoteRead)
	for id := range uint64(n) {
		p.send(tOfferRead, 0, u64(id+1, d.Addr, d.Key, d.Len)...)
	}
}

// A peer that broke the protocol: what had arrived before is read first.
func TestArrivedBeforeAViolation(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, messages, session.Config{KeepAlive: -1})
		p.send(tData, 0, []byte("one ")...)
		p.send(tData, 0, []byte("two")...)
		p.send(99, 0)
		time.Sleep(time.Second)
		got, err := io.ReadAll(readerOf(s))
		wantErr(t, "Read", err, syscall.ECONNRESET)
		if string(got) != "one two" {
			t.Errorf("%q was read before that", got)
		}
	})
}

// Credit that is due while there is no room is sent as soon as there is some.
func TestCreditWaitsForRoom(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		cfg := messages
		cfg.SendQueue = session.ControlReserve + 1
		s, _, p := negotiated(t, cfg, session.Config{KeepAlive: -1})
		p.Hold(twin.HoldMessages) // what is under way to the peer stays in the session's queue
		for range cfg.SendQueue {
			p.send(tPing, 0) // the answers fill it
			time.Sleep(time.Millisecond)
		}
		const n = 12
		for range n {
			p.send(tData, 0, 1)
			time.Sleep(time.Millisecond)
		}
		readFull(t, s, n)
		time.Sleep(time.Second) // idle
		p.Hold(0)
		for deadline := time.Now().Add(time.Second); time.Now().Before(deadline); {
			if m := p.recv(); m != nil && le.Uint32(m[4:]) >= n {
				return
			}
		}
		t.Error("the peer is not told of the buffers that are free again")
	})
}

// Abort ends what Close goes on delivering.
func TestAbortAfterClose(t *testing.T) {
	for name, cfg := range map[string]twin.Config{"messages": messages, "staged": staged, "ring": ring} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				s, e, _ := negotiated(t, cfg, session.Config{CloseTimeout: time.Hour, KeepAlive: -1})
				writeAll(t, s, pattern(20_000), 20_000)
				if err := s.Close(); err != nil {
					t.Fatal(err)
				}
				s.Abort()
				select {
				case <-s.Closed():
				case <-time.After(time.Second):
					t.Fatal("it goes on delivering")
				}
				if !e.Closed() {
					t.Error("the endpoint was not given back")
				}
			})
		})
	}
}

// A peer that does not read any more is no lack of buffers, whichever way the
// bytes would have gone.
func TestWriteToAPeerThatDoesNotReadWithoutInline(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		a, b, _, _ := pair(t, cfg, session.Config{Disable: session.FeatureInline})
		if err := b.CloseRead(); err != nil {
			t.Fatal(err)
		}
		for range 3 {
			if r := within(t, goWrite(a, pattern(50_000))); r.n != 50_000 || r.err != nil {
				t.Fatalf("Write to a peer that throws it away: %+v", r)
			}
		}
		b.Close()
		time.Sleep(time.Second)
		if _, err := a.Write(pattern(50_000)); !errors.Is(err, syscall.EPIPE) {
			t.Errorf("Write to a peer that has closed: %v", err)
		}
	})
}
