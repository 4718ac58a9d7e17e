package session_test

import (
	"bytes"
	"fmt"
	"io"
	"math"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/session"
	"github.com/sanconn/san/session/twin"
)

// D4, D5: small Writes go in messages, large ones by rendezvous.
func TestLargeWritesAreOffered(t *testing.T) {
	for _, tt := range []struct {
		size, threshold int
		offers          uint64
	}{
		{16<<10 - 1, 0, 0}, {16 << 10, 0, 1}, {1 << 20, 0, 1}, {1 << 20, -1, 0}, {1 << 20, 2 << 20, 0}, {5000, 4000, 1},
	} {
		for name, cfg := range map[string]twin.Config{"by read": byRead, "by write": byWrite} {
			t.Run(fmt.Sprintf("%s/%d of %d", name, tt.size, tt.threshold), func(t *testing.T) {
				inBubble(t, func(t *testing.T) {
					a, b, _, _ := pair(t, cfg, session.Config{Threshold: tt.threshold})
					data := pattern(tt.size)
					w := goWrite(a, data)
					if got := readFull(t, b, len(data)); !bytes.Equal(got, data) {
						t.Error("wrong bytes")
					}
					if r := within(t, w); r.n != len(data) || r.err != nil {
						t.Errorf("Write: %+v", r)
					}
					sa, sb := a.Stats(), b.Stats()
					if sa.OffersSent != tt.offers || sb.OffersReceived != tt.offers {
						t.Errorf("%d offers sent, %d received, want %d", sa.OffersSent, sb.OffersReceived, tt.offers)
					}
					if sa.BytesSent != uint64(tt.size) || sb.BytesReceived != uint64(tt.size) || sa.OfferedBytesSent != sb.OfferedBytesReceived {
						t.Errorf("counted %+v and %+v", sa, sb)
					}
				})
			})
		}
	}
}

// D6, D7: each side's abilities decide about the form; with none, or none left
// by the operator, payload does it all.
func TestBothEndsDecideTheForm(t *testing.T) {
	for name, tt := range map[string]struct {
		a, b    session.Limits
		disable session.Feature
		offered bool
	}{
		"reader reads":                  {byRead.Limits, byRead.Limits, 0, true},
		"only the other end can read":   {withLimits(byRead, func(l *session.Limits) { l.CanRead = false }), byRead.Limits, 0, true},
		"only this end can read":        {byRead.Limits, withLimits(byRead, func(l *session.Limits) { l.CanRead = false }), 0, false},
		"writer writes":                 {byWrite.Limits, byWrite.Limits, 0, true},
		"nothing to grant":              {byWrite.Limits, withLimits(byWrite, func(l *session.Limits) { l.MaxExpose = 0 }), 0, false},
		"nothing to offer":              {withLimits(byRead, func(l *session.Limits) { l.MaxExpose = 0 }), byRead.Limits, 0, false},
		"reading switched off":          {byRead.Limits, byRead.Limits, session.FeatureRDMARead, false},
		"writing switched off":          {byWrite.Limits, byWrite.Limits, session.FeatureRDMAWrite, false},
		"messages of different lengths": {byRead.Limits, withLimits(byRead, func(l *session.Limits) { l.MaxMessage = 300 }), 0, true},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				a, b, _, _ := pair(t, twin.Config{Limits: tt.a, PeerLimits: &tt.b}, session.Config{Disable: tt.disable})
				data := pattern(300_000)
				w := goWrite(a, data)
				if got := readFull(t, b, len(data)); !bytes.Equal(got, data) {
					t.Error("wrong bytes")
				}
				if r := within(t, w); r.n != len(data) || r.err != nil {
					t.Errorf("Write: %+v", r)
				}
				if got := a.Stats().OffersSent > 0; got != tt.offered {
					t.Errorf("offered: %v, want %v", got, tt.offered)
				}
			})
		})
	}
}

func withLimits(c twin.Config, f func(*session.Limits)) session.Limits {
	l := c.Limits
	f(&l)
	return l
}

// D9: memory that cannot be registered is sent otherwise.
func TestMemoryThatCannotBeRegisteredIsSentOtherwise(t *testing.T) {
	for name, tt := range map[string]struct {
		cfg    twin.Config
		faults twin.Faults
	}{
		"offered":            {byRead, twin.Faults{Expose: 1}},
		"granted":            {byWrite, twin.Faults{Expose: 1}},
		"read into":          {byRead, twin.Faults{Local: 1, Alloc: 1}},
		"written from":       {byWrite, twin.Faults{Local: 1}},
		"only chunks can be": {byRead, twin.Faults{Local: 1}},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				cfg := tt.cfg
				cfg.Faults = tt.faults
				a, b, _, _ := pair(t, cfg, session.Config{})
				data := pattern(100_000)
				w := goWrite(a, data)
				if got := readFull(t, b, len(data)); !bytes.Equal(got, data) {
					t.Error("wrong bytes")
				}
				if r := within(t, w); r.n != len(data) || r.err != nil {
					t.Errorf("Write: %+v", r)
				}
			})
		})
	}
}

// An offer that the peer refuses ends short: the rest comes as payload, in order.
func TestARefusedOfferEndsShort(t *testing.T) {
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

// An offer is cancelled once, however often the waiting Write polls.
func TestAnOfferIsCancelledOnce(t *testing.T) {
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

// A peer that takes its grant back, or is too late to, may give the next one.
func TestAGrantTakenBackIsFollowedByAnother(t *testing.T) {
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

// An offer stays behind what the outbox could not send.
func TestAnOfferStaysBehindTheOutbox(t *testing.T) {
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

// A Write has its memory back when it returns, whichever way it has ended: nobody has access
// to it any more.
func TestAWriteRevokesItsMemory(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, e, p := negotiated(t, byRead, session.Config{})
		for _, read := range []uint64{19_000, 500} { // all but what comes with the offer, and a part
			w := goWrite(s, pattern(19_000+offeredInline))
			id := uint64(le.Uint32(p.expect(tOfferRead)))
			if got := e.Left().Exposed; got != 1 {
				t.Fatalf("%d pieces of memory are exposed", got)
			}
			if read < 19_000 {
				pass(time.Millisecond)
				s.InterruptWrite(true)
				p.expect(tCancelRead)
			}
			p.send(tReadDone, 0, u64(id, read)...)
			if x := within(t, w); x.n != int(read)+offeredInline {
				t.Errorf("Write: %+v", x)
			}
			if got := e.Left().Exposed; got != 0 {
				t.Errorf("%d pieces of memory are exposed behind a Write", got)
			}
		}
	})
}

// A Write whose RDMA writes are under way when the connection ends aborts the endpoint before
// it returns: its memory is the caller's then.
func TestAWriteDoesNotLeaveItsRDMAWritesBehind(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		e := &lost{}
		s, _, p := negotiatedOn(t, byWrite, session.Config{Disable: session.FeatureRDMARead}, func(under *twin.Endpoint) session.Endpoint {
			e.Endpoint = under
			return e
		})
		e.Hold(twin.HoldWrites)
		w := goWrite(s, pattern(100_000))
		id := uint64(le.Uint32(p.expect(tOfferWrite)))
		d, _ := p.Expose(make([]byte, 1000), session.RemoteWrite)
		p.send(tGrant, 0, u64(id, d.Addr, d.Key, d.Len)...)
		pass(time.Second)
		if got := e.Left().Posted; got != 1 {
			t.Fatalf("%d RDMA writes are under way", got)
		}
		e.over.Store(true)
		p.send(tPing, 0) // it looks
		wantErr(t, "Write", within(t, w).err, syscall.ECONNRESET)
		if !e.Closed() {
			t.Error("Write has returned while its memory is written from")
		}
	})
}
