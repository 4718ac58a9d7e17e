package session_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/session"
	"github.com/sanconn/san/session/twin"
)

// N1, N2: the first message is the negotiation, of at most 256 bytes, and says
// how many messages may come.
func TestFirstMessageIsNegotiation(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		_, _, p := rawPair(t, byRead, session.Config{})
		m := p.recv()
		if len(m) != header+40 || m[0] != tNegotiate || string(m[header:header+4]) != "SANc" {
			t.Fatalf("the first message is %x", m)
		}
		if got, want := le.Uint32(m[header+8:]), uint32(byRead.Limits.Window-session.ControlReserve); got != want {
			t.Errorf("%d credits with a window of %d, want %d", got, byRead.Limits.Window, want)
		}
	})
}

// N3: a negotiation message that comes long before the acceptor looks costs
// nothing.
func TestEarlyNegotiationIsKept(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		cfg := byRead
		cfg.Violated = func(v twin.Violation) { t.Error(v) }
		ea, eb := twin.Pair(cfg)
		a := session.New(ea, session.Config{})
		pass(time.Minute)
		b := session.New(eb, session.Config{})
		negotiate(t, b)
		negotiate(t, a)
		a.Abort()
		b.Abort()
		idle()
	})
}

// N4: Negotiate ends when the peer's message has come, not before, and its
// context bounds the wait.
func TestNegotiateWaits(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := rawPair(t, byRead, session.Config{})
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		wantErr(t, "Negotiate with a silent peer", s.Negotiate(ctx), context.DeadlineExceeded)
		if n, err := p.send(tNegotiate, 0, parameters(1, 24, 4096, 0)...), error(nil); !n || err != nil {
			t.Fatal("no room")
		}
		negotiate(t, s)
	})
}

func TestNegotiationWithStrangers(t *testing.T) {
	good := parameters(1, 24, 4096, 0)
	with := func(at int, v ...byte) []byte {
		b := bytes.Clone(good)
		copy(b[at:], v)
		return b
	}
	for name, tt := range map[string]struct {
		typ    byte
		body   []byte
		reason session.Reason
	}{
		"another version":                 {tNegotiate, with(4, 2), session.ReasonVersion},
		"an old version":                  {tNegotiate, with(4, 0), session.ReasonVersion},
		"another magic":                   {tNegotiate, with(0, 'H', 'T', 'T', 'P'), session.ReasonProtocol},
		"data first":                      {tData, []byte("GET / HTTP/1.1\r\n"), session.ReasonProtocol},
		"an unknown type first":           {200, good, session.ReasonProtocol},
		"a short message":                 {tNegotiate, good[:39], session.ReasonProtocol},
		"an empty message":                {tNegotiate, nil, session.ReasonProtocol},
		"too few credits":                 {tNegotiate, parameters(1, 8, 4096, 0), session.ReasonProtocol},
		"no credits":                      {tNegotiate, parameters(1, 0, 4096, 0), session.ReasonProtocol},
		"more credits than can be":        {tNegotiate, parameters(1, 1<<20+1, 4096, 0), session.ReasonProtocol},
		"buffers too small for control":   {tNegotiate, parameters(1, 24, 255, 0), session.ReasonProtocol},
		"all capabilities there could be": {tNegotiate, parameters(1, 24, 4096, ^uint32(0)), session.ReasonNone},
		"something in the zero bytes":     {tNegotiate, with(20, 1, 2, 3, 4), session.ReasonNone},
		"more than this version knows":    {tNegotiate, append(bytes.Clone(good), make([]byte, 200)...), session.ReasonNone},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				s, _, p := rawPair(t, byRead, session.Config{})
				p.send(tt.typ, 0, tt.body...)
				err := s.Negotiate(context.Background())
				var u *session.Unavailable
				switch {
				case tt.reason == session.ReasonNone && err != nil:
					t.Errorf("Negotiate: %v", err)
				case tt.reason != session.ReasonNone && (!errors.As(err, &u) || u.Reason != tt.reason):
					t.Errorf("Negotiate: %v, want %v", err, tt.reason)
				}
			})
		})
	}
}

// A ring on one end and a queue pair on the other are no pair.
func TestNegotiationWithCreditsOnARing(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := rawPair(t, ring, session.Config{})
		p.send(tNegotiate, 0, parameters(1, 24, 4096, 0)...)
		var u *session.Unavailable
		if err := s.Negotiate(context.Background()); !errors.As(err, &u) || u.Reason != session.ReasonProtocol {
			t.Errorf("Negotiate: %v", err)
		}
	})
}

func TestNegotiationEndsWithThePeer(t *testing.T) {
	for name, end := range map[string]func(*raw){
		"closed":  func(p *raw) { p.Close() },
		"aborted": func(p *raw) { p.Abort() },
		"died":    func(p *raw) { p.Kill() },
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				s, _, p := rawPair(t, byRead, session.Config{})
				time.AfterFunc(time.Second, func() { end(p) })
				if err := s.Negotiate(context.Background()); err == nil {
					t.Error("Negotiate succeeded")
				}
			})
		})
	}
}

// What breaks the rules ends the connection, at both ends, and only that.
func TestBrokenRules(t *testing.T) {
	type step func(*raw)
	msg := func(typ, flags byte, body ...byte) step {
		return func(p *raw) { p.send(typ, flags, body...) }
	}
	credit := func(v uint32) step {
		return func(p *raw) {
			was := p.dropped
			p.dropped = v
			p.send(tCredit, 0)
			p.dropped = was
		}
	}
	desc := u64(1<<40, 7, 100_000)
	for name, tt := range map[string]struct {
		cfg   twin.Config
		steps []step
		fine  bool
	}{
		"unknown type":                    {messages, []step{msg(99, 0)}, false},
		"type zero":                       {messages, []step{msg(0, 0)}, false},
		"the largest type":                {messages, []step{msg(255, 0)}, false},
		"a second negotiation":            {messages, []step{msg(tNegotiate, 0, parameters(1, 24, 4096, 0)...)}, false},
		"a header cut short":              {messages, []step{func(p *raw) { p.ReserveControl(4); p.CommitControl(4) }}, false},
		"an offer cut short":              {byRead, []step{msg(tOfferRead, 0, u64(1, 2)...)}, false},
		"an offer of nothing":             {byRead, []step{msg(tOfferRead, 0, u64(1, 1<<40, 7, 0)...)}, false},
		"an endless offer":                {byRead, []step{msg(tOfferRead, 0, u64(1, 1<<40, 7, 1<<63)...)}, false},
		"an offer to write nothing":       {byWrite, []step{msg(tOfferWrite, 0, u64(1, 0)...)}, false},
		"two offers at once":              {byWrite, []step{msg(tOfferWrite, 0, u64(1, 100_000)...), msg(tOfferWrite, 0, u64(2, 100_000)...)}, false},
		"data behind an open offer":       {byWrite, []step{msg(tOfferWrite, 0, u64(1, 100_000)...), msg(tData, 0, 1, 2, 3)}, false},
		"shutdown behind an open offer":   {byWrite, []step{msg(tOfferWrite, 0, u64(1, 100_000)...), msg(tShutdown, 0)}, false},
		"data behind shutdown":            {messages, []step{msg(tShutdown, 0), msg(tData, 0, 1)}, false},
		"shutdown behind shutdown":        {messages, []step{msg(tShutdown, 0), msg(tShutdown, 0)}, false},
		"data behind close":               {messages, []step{msg(tClose, 0), msg(tData, 0, 1)}, false},
		"close behind close":              {messages, []step{msg(tClose, 0), msg(tClose, 0)}, false},
		"credit that jumps":               {messages, []step{credit(1 << 30)}, false},
		"credit that goes back":           {messages, []step{credit(^uint32(0))}, false},
		"credit for what was not sent":    {messages, []step{credit(20)}, false},
		"urgent data of nothing":          {messages, []step{msg(tUrgent, 0)}, false},
		"a grant cut short":               {byWrite, []step{msg(tGrant, 0, u64(1)...)}, false},
		"a cancel cut short":              {byRead, []step{msg(tCancelRead, 0)}, false},
		"written without a grant":         {byWrite, []step{msg(tOfferWrite, 0, u64(1, 100_000)...), msg(tWriteDone, 0, u64(1, 1<<40)...)}, false},
		"unknown flags":                   {messages, []step{msg(tData, 0xFE, 1), msg(tPing, 0xFF)}, true},
		"something in the zero bytes":     {messages, []step{func(p *raw) { b := p.Reserve(9, 9); copy(b, []byte{tData, 0, 9, 9, 0, 0, 0, 0, 1}); p.Commit(9) }}, true},
		"more than a type needs":          {messages, []step{msg(tPing, 0, 1, 2, 3, 4), msg(tShutdown, 0, 9)}, true},
		"empty data":                      {messages, []step{msg(tData, 0)}, true},
		"a grant for no offer":            {byWrite, []step{msg(tGrant, 0, append(u64(9), desc...)...)}, true},
		"done for no offer":               {byRead, []step{msg(tReadDone, 0, u64(9, 100)...), msg(tWriteDone, 1, u64(9, 100)...)}, true},
		"cancel for no offer":             {byRead, []step{msg(tCancelRead, 0, u64(9)...), msg(tCancelWrite, 0, u64(9)...)}, true},
		"a pong that was not asked for":   {messages, []step{msg(tPong, 0)}, true},
		"an acknowledgement out of place": {messages, []step{msg(tCloseAck, 0)}, true},
		"close behind shutdown":           {messages, []step{msg(tShutdown, 0), msg(tClose, 0)}, true},
	} {
		check := func(t *testing.T, reads bool) {
			inBubble(t, func(t *testing.T) {
				s, _, p := negotiated(t, tt.cfg, session.Config{KeepAlive: -1})
				if reads {
					goRead(s, make([]byte, 100))
					pass(time.Second)
				}
				for _, step := range tt.steps {
					step(p)
				}
				pass(time.Second) // without a Read too what messages say is acted on (D3)
				n, err := s.WriteUrgent([]byte("alive?"))
				if alive := err == nil && n == 6; alive != tt.fine && !errors.Is(err, syscall.EPIPE) {
					t.Fatalf("the connection lives: %v (%v), want %v", alive, err, tt.fine)
				}
				if !tt.fine {
					for err = nil; err == nil; {
						_, err = s.Read(make([]byte, 100))
					}
					if strings.HasSuffix(name, "behind close") || strings.HasSuffix(name, "behind shutdown") {
						wantErr(t, "Read of a stream that had ended in order", err, io.EOF)
						return
					}
					wantErr(t, "Read", err, syscall.ECONNRESET)
					if !strings.Contains(err.Error(), "protocol") {
						t.Errorf("Read: %v: does not say who is to blame", err)
					}
				}
			})
		}
		t.Run(name, func(t *testing.T) { check(t, false) })
		t.Run(name+", to a Read", func(t *testing.T) { check(t, true) })
	}
}

// D3: messages are acted on though the application does not read.
func TestActedOnWhileNobodyReads(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		_, _, p := negotiated(t, byRead, session.Config{KeepAlive: -1})
		pass(time.Hour) // the session has gone to sleep long ago
		p.send(tPing, 0)
		p.expect(tPong)
		p.send(tUrgent, 0, 'u')
		p.send(tPing, 0)
		p.expect(tPong)
	})
}

// … and soon: what is offered to an application that has begun to compute, in the
// middle of a busy spell, waits for two ticks of the janitor at most.
func TestActedOnBehindABusySpell(t *testing.T) {
	const bound = 2*16*time.Millisecond + time.Millisecond // docs/ARCHITECTURE.md, When nobody is inside
	for name, cfg := range map[string]twin.Config{"by read": byRead, "by write": byWrite} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				a, b, _, _ := pair(t, cfg, session.Config{KeepAlive: -1})
				offer := func() {
					t.Helper()
					began := time.Now()
					if _, err := a.Write(make([]byte, 64<<10)); err != nil {
						t.Fatal(err)
					}
					if took := time.Since(began); took > bound {
						t.Errorf("a peer that computes has answered after %v, want %v at most", took, bound)
					}
				}
				busy := func(spell time.Duration) {
					t.Helper()
					for began := time.Now(); time.Since(began) < spell; { // there and back
						for _, s := range [][2]*session.Session{{a, b}, {b, a}} {
							if _, err := s[0].Write([]byte("x")); err != nil {
								t.Fatal(err)
							}
							readFull(t, s[1], 1)
						}
					}
				}
				for spell := 60 * time.Millisecond; spell <= 76*time.Millisecond; spell += 2 * time.Millisecond {
					busy(spell)
					offer()
					readFull(t, b, 64<<10)
				}
				busy(60 * time.Millisecond)
				// One that reads little by little what has come long ago, and answers.
				if _, err := a.Write(make([]byte, 1000)); err != nil {
					t.Fatal(err)
				}
				const pieces = 200
				done := make(chan struct{}, 2)
				go func() {
					for n, err := 0, error(nil); n < pieces && err == nil; {
						var k int
						k, err = a.Read(make([]byte, 10))
						n += k
					}
					done <- struct{}{}
				}()
				go func() {
					for range pieces {
						b.Read(make([]byte, 1))
						b.Write([]byte("x"))
						nap(10 * time.Millisecond)
					}
					done <- struct{}{}
				}()
				pass(105 * time.Millisecond)
				offer()
				<-done
				<-done
			})
		})
	}
}

// An idle connection does nothing at all: no polling, no timer.
func TestIdleCostsNothing(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, b, ea, eb := pair(t, byRead, session.Config{KeepAlive: -1})
		if _, err := a.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		readFull(t, b, 1)
		r := goRead(b, make([]byte, 1)) // one end waits, the other does nothing
		pass(time.Second)
		before := ea.Calls() + eb.Calls()
		pass(24 * time.Hour)
		if after := ea.Calls() + eb.Calls(); after != before {
			t.Errorf("%d calls into the endpoints in an idle day", after-before)
		}
		if _, err := a.Write([]byte("y")); err != nil {
			t.Fatal(err)
		}
		if got := within(t, r); got.n != 1 || got.err != nil {
			t.Errorf("Read after a day: %+v", got)
		}
	})
}

// D4, D5: small Writes go in messages, large ones by rendezvous.
func TestThreshold(t *testing.T) {
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
func TestForms(t *testing.T) {
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

// A Read that waits with a large slice gets the bytes without a copy between:
// nothing of them passes through memory of the session's.
func TestLargeReadIsDirect(t *testing.T) {
	for name, cfg := range map[string]twin.Config{"by read": byRead, "by write": byWrite} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				cfg.AllocBudget = 1 // no chunk can be had
				a, b, _, _ := pair(t, cfg, session.Config{})
				data, into := pattern(500_000), make([]byte, 500_000)
				r := goRead(b, into)
				pass(time.Second)
				w := goWrite(a, data)
				got := 0
				for got < len(data) {
					x := within(t, r)
					if x.err != nil {
						t.Fatal(x.err)
					}
					if got += x.n; got < len(data) {
						r = goRead(b, into[got:])
					}
				}
				if x := within(t, w); x.n != len(data) || x.err != nil {
					t.Errorf("Write: %+v", x)
				}
				if !bytes.Equal(into, data) {
					t.Error("wrong bytes")
				}
				if moved := b.Stats().OfferedBytesReceived; moved < 490_000 {
					t.Errorf("%d bytes moved by RDMA", moved)
				}
			})
		})
	}
}

// Two peers that both write before they read do not deadlock where TCP would
// not.
func TestBothWriteFirst(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		const size = 200_000
		cfg.QueueBytes = size + 64<<10 // a ring is the socket's buffer
		a, b, _, _ := pair(t, cfg, session.Config{})
		data := pattern(size)
		wa, wb := goWrite(a, data), goWrite(b, data)
		for _, w := range []<-chan result{wa, wb} {
			if r := within(t, w); r.n != size || r.err != nil {
				t.Fatalf("Write: %+v", r)
			}
		}
		for _, s := range []*session.Session{a, b} {
			if got := readFull(t, s, size); !bytes.Equal(got, data) {
				t.Error("wrong bytes")
			}
		}
	})
}

// Nobody reads: Write takes what the budgets allow, and then waits, however
// much there is to write.
func TestBudgetsBoundMemory(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		cfg.AllocBudget = 1 << 30
		a, b, _, eb := pair(t, cfg, session.Config{ReceiveBudget: 100_000, SendBudget: 50_000})
		data := pattern(4 << 20)
		w := goWrite(a, data)
		pass(time.Minute)
		select {
		case r := <-w:
			t.Fatalf("Write ended though nobody reads: %+v", r)
		default:
		}
		if got := eb.Left().Allocated; got > 100_000+16<<10 {
			t.Errorf("the receiver holds %d bytes with a budget of 100000", got)
		}
		if got := readFull(t, b, len(data)); !bytes.Equal(got, data) {
			t.Error("wrong bytes")
		}
		if r := within(t, w); r.n != len(data) || r.err != nil {
			t.Errorf("Write: %+v", r)
		}
	})
}

// D9: memory that cannot be registered is sent otherwise.
func TestMemoryThatCannotBeRegistered(t *testing.T) {
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

// D10: urgent data passes data that waits, and needs no Read.
func TestUrgentPassesBlockedData(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		a, b, _, _ := pair(t, cfg, session.Config{ReceiveBudget: 1, SendBudget: 1})
		data := pattern(1 << 20)
		w := goWrite(a, data)
		pass(time.Second)
		if _, err := a.WriteUrgent([]byte("now!")); err != nil {
			t.Fatalf("WriteUrgent: %v", err)
		}
		select {
		case <-b.Urgent():
		case <-time.After(time.Second):
			t.Fatal("urgent data waits behind data")
		}
		got := make([]byte, 100)
		n, err := b.ReadUrgent(got)
		if string(got[:n]) != "now!" || err != nil {
			t.Errorf("ReadUrgent: %q, %v", got[:n], err)
		}
		_, err = b.ReadUrgent(got)
		wantErr(t, "ReadUrgent once more", err, session.ErrNoUrgent)
		if got := readFull(t, b, len(data)); !bytes.Equal(got, data) {
			t.Error("urgent data is in the stream")
		}
		within(t, w)
	})
}

func TestUrgentLimits(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, b, _, _ := pair(t, messages, session.Config{})
		for _, n := range []int{0, session.MaxUrgent + 1} {
			if _, err := a.WriteUrgent(make([]byte, n)); err == nil {
				t.Errorf("%d bytes of urgent data were taken", n)
			}
		}
		for i := range byte(3) { // the newest replaces what was not read
			if _, err := a.WriteUrgent(bytes.Repeat([]byte{i}, session.MaxUrgent)); err != nil {
				t.Fatal(err)
			}
		}
		pass(time.Second)
		got := make([]byte, 10)
		if n, err := b.ReadUrgent(got); n != 10 || err != nil || got[0] != 2 {
			t.Errorf("ReadUrgent: %d, %v, %v", n, err, got)
		}
	})
}

// A peer that says more than MaxUrgent bytes has no more than those kept.
func TestUrgentOfThePeerIsBounded(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, messages, session.Config{KeepAlive: -1})
		p.send(tUrgent, 0, pattern(10*session.MaxUrgent)...)
		pass(time.Second)
		got := make([]byte, 20*session.MaxUrgent)
		n, err := s.ReadUrgent(got)
		if err != nil || !bytes.Equal(got[:n], pattern(session.MaxUrgent)) {
			t.Errorf("ReadUrgent: %d bytes, %v", n, err)
		}
	})
}

// A Write that is interrupted returns the exact number of bytes that are the
// peer's, and does not touch its slice any more; the next Write goes on there.
func TestInterruptedWriteCounts(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		cfg = inPieces(cfg)
		a, b, _, _ := pair(t, cfg, session.Config{ReceiveBudget: 30_000, SendBudget: 1000})
		data := pattern(1 << 20)
		mine := bytes.Clone(data)
		w := goWrite(a, mine)
		got := readFull(t, b, 100_000)
		a.InterruptWrite(true)
		r := within(t, w)
		wantErr(t, "Write", r.err, session.ErrInterrupted)
		fill(mine, usedWrite)
		n, err := a.Write(data[r.n:])
		wantErr(t, "Write while interrupted", err, session.ErrInterrupted)
		if n != 0 {
			t.Errorf("Write while interrupted: %d", n)
		}
		a.InterruptWrite(false)
		w = goWrite(a, data[r.n:])
		got = append(got, readFull(t, b, len(data)-len(got))...)
		if !bytes.Equal(got, data) {
			t.Errorf("the stream went on at another place than %d", r.n)
		}
		if r := within(t, w); r.err != nil {
			t.Errorf("Write: %+v", r)
		}
	})
}

// … and it stops soon: what is under way is waited for, no more is begun.
func TestInterruptedWriteStopsSoon(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		const size = 8 << 20
		cfg = inPieces(cfg)
		a, b, _, _ := pair(t, cfg, session.Config{})
		r := goRead(b, make([]byte, size))
		pass(time.Second)
		w := goWrite(a, pattern(size))
		pass(20 * latency)
		a.InterruptWrite(true)
		began := time.Now()
		if x := within(t, w); x.n >= size {
			t.Errorf("Write: %+v", x)
		}
		if took := time.Since(began); took > 20*latency {
			t.Errorf("Write returned %v later, with a latency of %v", took, latency)
		}
		within(t, r)
	})
}

// A Read that is interrupted in the middle of a transfer returns what it has,
// or nothing; no byte is lost, and none comes later.
func TestInterruptedReadLosesNothing(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		cfg = inPieces(cfg)
		a, b, _, _ := pair(t, cfg, session.Config{})
		data := pattern(1 << 20)
		w := goWrite(a, data)
		var got []byte
		for i := 0; len(got) < len(data); i++ {
			into := make([]byte, 200_000)
			r := goRead(b, into)
			pass(time.Duration(i%40) * latency / 7)
			b.InterruptRead(true)
			x := within(t, r)
			if x.err != nil {
				wantErr(t, "Read", x.err, session.ErrInterrupted)
			}
			got = append(got, into[:x.n]...)
			fill(into, usedRead)
			pass(time.Millisecond)
			if changed(into, usedRead) >= 0 {
				t.Fatal("the slice was touched after Read returned")
			}
			// An expired deadline fails even when data is ready.
			n, err := b.Read(into)
			wantErr(t, "Read while interrupted", err, session.ErrInterrupted)
			if n != 0 {
				t.Errorf("Read while interrupted: %d", n)
			}
			b.InterruptRead(false)
		}
		if !bytes.Equal(got, data) {
			t.Error("wrong bytes")
		}
		within(t, w)
	})
}

// Done crosses Cancel: the peer has everything when it is asked to stop, and
// both ends agree on that.
func TestDoneCrossesCancel(t *testing.T) {
	for name, cfg := range map[string]twin.Config{"by read": byRead, "by write": byWrite} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				a, b, ea, _ := pair(t, cfg, session.Config{})
				data, into := pattern(50_000), make([]byte, 50_000)
				r := goRead(b, into)
				pass(time.Second)
				w := goWrite(a, data)
				pass(latency / 2)
				ea.Hold(twin.HoldMessages | twin.HoldWrites) // ReadDone is on its way, and stays there
				pass(time.Second)
				a.InterruptWrite(true) // Cancel goes out
				pass(100 * time.Millisecond)
				ea.Hold(0)
				x, y := within(t, w), within(t, r)
				a.InterruptWrite(false)
				if (x.n == len(data)) != (x.err == nil) {
					t.Errorf("Write: %+v", x)
				}
				w = goWrite(a, data[x.n:]) // at times nothing
				copy(into[y.n:], readFull(t, b, len(data)-y.n))
				within(t, w)
				if !bytes.Equal(into, data) {
					t.Errorf("Write says %d bytes, which is not what the peer has", x.n)
				}
			})
		})
	}
}

// D12: a peer that does not stop a cancelled transfer in time costs the
// connection; when Write or Read has returned, its slice is not touched.
func TestCancelIsBounded(t *testing.T) {
	for name, tt := range map[string]struct {
		cfg  twin.Config
		hold twin.Hold
		at   int // whose completions are held back
	}{
		"a Write whose peer goes on reading":  {byRead, twin.HoldReads, 1},
		"a Write whose completions are late":  {byWrite, twin.HoldWrites, 0},
		"a Write whose peer does not listen":  {byRead, twin.HoldMessages, 1},
		"a granter that does not say anymore": {byWrite, twin.HoldMessages, 0},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				a, b, ea, eb := pair(t, tt.cfg, session.Config{CancelTimeout: 3 * time.Second, KeepAlive: -1})
				data := pattern(200_000)
				into := make([]byte, len(data))
				r := goRead(b, into)
				pass(time.Second)
				[]*twin.Endpoint{ea, eb}[tt.at].Hold(tt.hold)
				w := goWrite(a, data)
				pass(time.Second)
				began := time.Now()
				a.InterruptWrite(true)
				x := within(t, w)
				fill(data, usedWrite)
				if took := time.Since(began); took > 4*time.Second {
					t.Errorf("Write returned %v after it was interrupted", took)
				}
				if x.err == nil {
					t.Errorf("Write: %+v", x)
				}
				b.InterruptRead(true)
				began = time.Now()
				within(t, r)
				fill(into, usedRead)
				if took := time.Since(began); took > 4*time.Second {
					t.Errorf("Read returned %v after it was interrupted", took)
				}
				[]*twin.Endpoint{ea, eb}[tt.at].Hold(0)
				pass(time.Minute)
				if changed(into, usedRead) >= 0 {
					t.Error("the slice was touched after Read returned")
				}
			})
		})
	}
}

// E1: each direction ends on its own.
func TestHalfClose(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		a, b, _, _ := pair(t, cfg, session.Config{})
		w := goWrite(a, pattern(100_000))
		got := make(chan result, 1)
		go func() {
			n, err := io.Copy(io.Discard, readerOf(b))
			got <- result{int(n), err}
		}()
		within(t, w)
		if err := a.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		if r := within(t, got); r.n != 100_000 || r.err != nil {
			t.Errorf("read to the end: %+v", r)
		}
		_, err := a.Write([]byte("x"))
		wantErr(t, "Write after CloseWrite", err, session.ErrClosed)
		for range 3 { // the other direction lives
			w := goWrite(b, pattern(100_000))
			readFull(t, a, 100_000)
			if r := within(t, w); r.err != nil {
				t.Fatal(r.err)
			}
			pass(time.Hour)
		}
	})
}

type readerOf2 struct{ s *session.Session }

func (r readerOf2) Read(p []byte) (int, error) { return r.s.Read(p) }

func readerOf(s *session.Session) io.Reader { return readerOf2{s} }

// After CloseRead what comes is thrown away: the peer can go on writing.
func TestCloseReadThrowsAway(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		a, b, _, _ := pair(t, cfg, session.Config{ReceiveBudget: 1, SendBudget: 1})
		w := goWrite(a, pattern(1<<20))
		pass(time.Second)
		if err := b.CloseRead(); err != nil {
			t.Fatal(err)
		}
		if n, err := b.Read(make([]byte, 10)); n != 0 || err != io.EOF {
			t.Errorf("Read: %d, %v", n, err)
		}
		if r := within(t, w); r.n != 1<<20 || r.err != nil {
			t.Errorf("Write: %+v", r)
		}
		for range 3 {
			if r := within(t, goWrite(a, pattern(1<<20))); r.err != nil {
				t.Errorf("Write: %+v", r)
			}
		}
	})
}

// E2: Close ends what waits.
func TestCloseEndsWaiting(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		a, _, ea, _ := pair(t, cfg, session.Config{ReceiveBudget: 1, SendBudget: 1, CloseTimeout: time.Second})
		into := make([]byte, 100_000)
		r, w := goRead(a, into), goWrite(a, pattern(1<<20))
		pass(time.Second)
		began := time.Now()
		if err := a.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
		if took := time.Since(began); took > 3*time.Second {
			t.Errorf("Close took %v", took)
		}
		wantErr(t, "Read", within(t, r).err, session.ErrClosed)
		wantErr(t, "Write", within(t, w).err, session.ErrClosed)
		wantErr(t, "Close once more", a.Close(), session.ErrClosed)
		_, err := a.Read(into)
		wantErr(t, "Read", err, session.ErrClosed)
		_, err = a.Write(into)
		wantErr(t, "Write", err, session.ErrClosed)
		select {
		case <-a.Closed():
		case <-time.After(time.Minute):
			t.Fatal("never closed")
		}
		if left := ea.Left(); left.Exposed != 0 || left.Allocated != 0 {
			t.Errorf("left behind: %+v", left)
		}
	})
}

// While a Close goes on delivering to a peer that is silent, what comes behind it does
// not wait for that.
func TestWriteWhileCloseDelivers(t *testing.T) {
	for name, cfg := range map[string]twin.Config{"messages": messages, "by read": byRead, "boxed": boxed} {
		for _, after := range []time.Duration{time.Millisecond, time.Minute} { // Close itself waits, or no more
			t.Run(fmt.Sprint(name, " ", after), func(t *testing.T) {
				inBubble(t, func(t *testing.T) {
					s, e, _ := negotiated(t, cfg, session.Config{CloseTimeout: time.Hour, KeepAlive: -1})
					writeAll(t, s, pattern(10_000), 10_000)
					go s.Close()
					pass(after)
					if e.Closed() {
						t.Fatal("it delivers nothing")
					}
					calls := map[string]func() (int, error){
						"CloseWrite":              func() (int, error) { return 0, s.CloseWrite() },
						"Write of nothing":        func() (int, error) { return s.Write(nil) },
						"WriteBuffers of nothing": func() (int, error) { n, err := s.WriteBuffers(nil); return int(n), err },
					}
					for _, size := range []int{100, 10_000, 100_000} {
						p := pattern(size)
						calls[fmt.Sprint("Write of ", size)] = func() (int, error) { return s.Write(p) }
						calls[fmt.Sprint("WriteBuffers of ", size)] = func() (int, error) {
							n, err := s.WriteBuffers([][]byte{p, p})
							return int(n), err
						}
					}
					for what, call := range calls {
						began := time.Now()
						c := make(chan result, 1)
						go func() { n, err := call(); c <- result{n, err} }()
						x := within(t, c)
						wantErr(t, what, x.err, session.ErrClosed)
						if took := time.Since(began); took != 0 || x.n != 0 {
							t.Errorf("%s: %d, after %v", what, x.n, took)
						}
					}
				})
			})
		}
	}
}

// What was written before Close arrives, and then io.EOF, though Close returns
// before the peer has read any of it.
func TestCloseDelivers(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		const size = 50_000
		a, b, _, _ := pair(t, cfg, session.Config{})
		data := pattern(size)
		if r := within(t, goWrite(a, data)); r.err != nil {
			t.Fatal(r.err)
		}
		began := time.Now()
		a.Close()
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("Close took %v", took)
		}
		pass(5 * time.Second) // less than CloseTimeout
		got, err := io.ReadAll(readerOf(b))
		if err != nil || !bytes.Equal(got, data) {
			t.Errorf("%d bytes of %d, %v", len(got), size, err)
		}
		_, err = b.Write([]byte("x"))
		if err == nil {
			pass(time.Second)
			_, err = b.Write([]byte("x"))
		}
		wantErr(t, "Write to a closed peer", err, syscall.EPIPE)
	})
}

// As with TCP: Close with data that was not read is a reset, behind what was
// written.
func TestCloseWithUnreadData(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		a, b, _, _ := pair(t, cfg, session.Config{})
		if _, err := b.Write(pattern(1000)); err != nil {
			t.Fatal(err)
		}
		if _, err := a.Write(pattern(2000)); err != nil {
			t.Fatal(err)
		}
		pass(2 * latency) // it is here, and nobody has looked
		a.Close()
		got, err := io.ReadAll(readerOf(b))
		wantErr(t, "reading to the end", err, syscall.ECONNRESET)
		if !bytes.Equal(got, pattern(2000)) {
			t.Errorf("%d bytes before the reset, want 2000", len(got))
		}
	})
}

// A Write that waits for a peer which closes fails, whichever way its bytes go:
// they were not thrown away behind its back.
func TestWriteToAPeerThatCloses(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		a, b, _, _ := pair(t, cfg, session.Config{ReceiveBudget: 1})
		const size = 4 << 20
		w := goWrite(a, pattern(size))
		readFull(t, b, 100_000)
		b.Close()
		x := within(t, w)
		wantErr(t, "Write", x.err, syscall.EPIPE)
		if x.n < 100_000 || x.n >= size {
			t.Errorf("Write took %d bytes of %d, 100,000 were read", x.n, size)
		}
	})
}

func TestAbortResets(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		a, b, _, _ := pair(t, cfg, session.Config{ReceiveBudget: 1, SendBudget: 1})
		into := make([]byte, 100)
		r, w := goRead(b, into), goWrite(b, pattern(1<<20))
		pass(time.Second)
		a.Abort()
		wantErr(t, "Read", within(t, r).err, syscall.ECONNRESET)
		if err := within(t, w).err; !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.EPIPE) {
			t.Errorf("Write: %v", err)
		}
		wantErr(t, "Close after Abort", a.Close(), session.ErrClosed)
	})
}

// An offer that ended short is a Write that was not completed: a stream that
// ends there was cut.
func TestDeathBehindAShortOffer(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, b, ea, _ := pair(t, byRead, session.Config{ReceiveBudget: 1})
		w := goWrite(a, pattern(1<<20))
		pass(time.Second)
		a.InterruptWrite(true)
		x := within(t, w)
		wantErr(t, "Write", x.err, session.ErrInterrupted)
		pass(time.Second)
		ea.Kill()
		got, err := io.ReadAll(readerOf(b))
		wantErr(t, "Read", err, syscall.ECONNRESET)
		if len(got) != x.n {
			t.Errorf("Write took %d bytes, %d were read", x.n, len(got))
		}
	})
}

// A stream cut short must not look complete. The one exception: all that a
// process wrote before it ended is in shared memory.
func TestDeathOfThePeer(t *testing.T) {
	for name, tt := range map[string]struct {
		cfg    twin.Config
		inside bool // a Write
		want   error
	}{
		"queue pair":                 {messages, false, syscall.ECONNRESET},
		"queue pair, inside a Write": {byRead, true, syscall.ECONNRESET},
		"ring":                       {ring, false, io.EOF},
		"ring, inside a Write":       {ring, true, syscall.ECONNRESET},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				a, b, ea, _ := pair(t, tt.cfg, session.Config{ReceiveBudget: 1})
				if _, err := a.Write(pattern(5000)); err != nil {
					t.Fatal(err)
				}
				if tt.inside {
					goWrite(a, pattern(1<<20))
				}
				pass(time.Second)
				ea.Kill()
				got, err := io.ReadAll(readerOf(b))
				if tt.want == io.EOF && err != nil || tt.want != io.EOF && !errors.Is(err, tt.want) {
					t.Errorf("the end: %v, want %v", err, tt.want)
				}
				if len(got) < 5000 || !bytes.Equal(got, pattern(len(got))) && !tt.inside {
					t.Errorf("%d bytes before it", len(got))
				}
			})
		})
	}
}

// A Write behind the end of the connection fails, and the first one does: what nobody
// will get is not taken over.
func TestWriteBehindTheEnd(t *testing.T) {
	for name, tt := range map[string]struct {
		cfg   twin.Config
		boxes bool // are there
		size  int
	}{
		"small": {messages, false, 100}, "large": {messages, false, 20_000}, "before an offer": {byRead, false, 10_000},
		"small, boxes": {boxed, true, 100}, "boxes": {boxed, true, 20_000}, "no boxes yet": {boxed, false, 20_000},
	} {
		for _, slices := range []int{0, 1, 3} {
			t.Run(fmt.Sprint(name, "/", slices), func(t *testing.T) {
				inBubble(t, func(t *testing.T) {
					s, _, p := negotiated(t, tt.cfg, session.Config{KeepAlive: -1})
					if tt.boxes {
						in := p.open(s, 100_000)
						writeAll(t, s, pattern(20_000), 20_000)
						in.read(20_000)
						in.emptied()
					}
					p.Kill()
					pass(time.Second)
					x := result{}
					if slices == 0 {
						x.n, x.err = s.Write(pattern(tt.size))
					} else {
						var v [][]byte
						for range slices {
							v = append(v, pattern(tt.size/slices))
						}
						n, err := s.WriteBuffers(v)
						x = result{int(n), err}
					}
					wantErr(t, "Write", x.err, syscall.ECONNRESET)
					if x.n != 0 {
						t.Errorf("%d bytes were taken", x.n)
					}
				})
			})
		}
	}
}

// Keepalive finds a peer that says nothing, in four periods.
func TestKeepAlive(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, b, ea, _ := pair(t, messages, session.Config{KeepAlive: 10 * time.Second})
		pass(time.Hour) // both ends answer
		if _, err := a.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		readFull(t, b, 1)
		ea.Cut()
		began := time.Now()
		for _, s := range []*session.Session{a, b} {
			_, err := s.Read(make([]byte, 1))
			wantErr(t, "Read", err, syscall.ETIMEDOUT)
		}
		if took := time.Since(began); took < 30*time.Second || took > 60*time.Second {
			t.Errorf("it took %v", took)
		}
	})
}

// A period without its unit, nanoseconds, is a second, as the kernel has it for TCP:
// a peer that lives has time to answer.
func TestKeepAliveOfNanoseconds(t *testing.T) {
	for _, configured := range []time.Duration{time.Hour, 30} {
		inBubble(t, func(t *testing.T) {
			a, b, _, _ := pair(t, messages, session.Config{KeepAlive: configured})
			if configured == time.Hour {
				a.SetKeepAlivePeriod(30)
			}
			pass(time.Minute)
			if _, err := b.Write([]byte("x")); err != nil {
				t.Fatal(err)
			}
			readFull(t, a, 1)
		})
	}
}

// What counts are questions in a row that are not answered.
func TestKeepAliveCountsInARow(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, messages, session.Config{KeepAlive: time.Second})
		for range 10 {
			pass(3 * time.Second / 2) // expect waits for one; at the first look nothing is asked
			p.expect(tPing)           // lost
			pass(time.Second / 2)
			p.expect(tPing)
			p.send(tPong, 0)
		}
		if _, err := s.WriteUrgent([]byte("alive")); err != nil {
			t.Error(err)
		}
	})
}

// A peer is asked three times, an interval apart, before it is given up.
func TestKeepAliveAsksThreeTimes(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, messages, session.Config{KeepAlive: time.Second})
		r := goRead(s, make([]byte, 1))
		pass(time.Minute)
		wantErr(t, "Read", within(t, r).err, syscall.ETIMEDOUT)
		asked := 0
		for m := p.recv(); m != nil; m = p.recv() {
			if m[0] == tPing {
				asked++
			}
		}
		if asked != 3 {
			t.Errorf("it was asked %d times, want 3", asked)
		}
	})
}

// An interval that is set counts from then on, and is the one that keepalive has when
// it is switched on again.
func TestKeepAlivePeriod(t *testing.T) {
	for _, again := range []bool{false, true} {
		inBubble(t, func(t *testing.T) {
			a, _, ea, _ := pair(t, messages, session.Config{KeepAlive: time.Hour})
			ea.Cut()
			const interval = 2 * time.Second
			a.SetKeepAlivePeriod(interval)
			if again {
				a.SetKeepAlive(false)
				a.SetKeepAlive(true)
			}
			began := time.Now()
			wantErr(t, "Read", within(t, goRead(a, make([]byte, 1))).err, syscall.ETIMEDOUT)
			if took := time.Since(began); took < 3*interval || took > 5*interval {
				t.Errorf("the end came after %v, with questions each %v", took, interval)
			}
		})
	}
}

func TestKeepAliveOff(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, _, ea, _ := pair(t, messages, session.Config{KeepAlive: -1})
		ea.Cut()
		r := goRead(a, make([]byte, 1))
		select {
		case x := <-r:
			t.Errorf("Read: %+v", x)
		case <-time.After(24 * time.Hour):
		}
		a.SetKeepAlivePeriod(time.Second)
		a.SetKeepAlive(true)
		wantErr(t, "Read", within(t, r).err, syscall.ETIMEDOUT)
	})
}

// Switched on again, keepalive has the interval that it had, and the default if it
// was off from the start.
func TestKeepAliveOnAgain(t *testing.T) {
	for _, c := range []struct{ configured, interval time.Duration }{
		{2 * time.Second, 2 * time.Second},
		{-1, 15 * time.Second},
	} {
		inBubble(t, func(t *testing.T) {
			a, _, ea, _ := pair(t, messages, session.Config{KeepAlive: c.configured})
			ea.Cut()
			a.SetKeepAlive(false)
			r := goRead(a, make([]byte, 1))
			select {
			case x := <-r:
				t.Errorf("Read: %+v", x)
			case <-time.After(24 * time.Hour):
			}
			a.SetKeepAlivePeriod(-1) // as it was
			a.SetKeepAlive(true)
			began := time.Now()
			wantErr(t, "Read", within(t, r).err, syscall.ETIMEDOUT)
			if took := time.Since(began); took < 3*c.interval || took > 5*c.interval {
				t.Errorf("the end came after %v, with questions each %v", took, c.interval)
			}
		})
	}
}

// A Write that stops waiting leaves a Read that waits its wake-up: what comes
// is read at once, and not when somebody happens to look.
func TestWaitingDirectionsAreIndependent(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		a, b, _, _ := pair(t, cfg, session.Config{ReceiveBudget: 1, SendBudget: 1})
		r, w := goRead(a, make([]byte, 10)), goWrite(a, pattern(1<<20))
		pass(time.Second)
		a.InterruptWrite(true)
		within(t, w)
		began := time.Now()
		if _, err := b.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		if x := within(t, r); x.n != 1 || x.err != nil {
			t.Errorf("Read: %+v", x)
		}
		if took := time.Since(began); took > 2*latency {
			t.Errorf("it took %v, with a latency of %v", took, latency)
		}
	})
}

// Control messages cost credit too: a peer that gives none gets no more than it
// has buffers for, and the rest when it gives some.
func TestControlKeepsToItsCredit(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		_, _, p := negotiated(t, messages, session.Config{KeepAlive: -1})
		p.dropped = 0
		pongs := func() (n int) {
			for {
				m := p.recv()
				if m == nil {
					return n
				}
				p.dropped = 0 // says that nothing was dealt with
				if m[0] == tPong {
					n++
				}
			}
		}
		granted := messages.Limits.Window - session.ControlReserve
		for range granted + 5 {
			if !p.send(tPing, 0) {
				pass(time.Millisecond)
			}
			pass(time.Millisecond)
		}
		if got := pongs(); got != granted-1 { // Negotiate was one
			t.Errorf("%d answers with %d credits, one of them used", got, granted)
		}
		p.dropped = uint32(granted)
		p.send(tCredit, 0)
		p.dropped = 0
		if got := pongs(); got != 6 {
			t.Errorf("%d answers after credit was given, want 6", got)
		}
	})
}

// Writes of several goroutines do not mix, Reads of several get each byte once.
// Data leaves the credits that are control's: what is said has to pass it.
func TestDataLeavesControlItsCredit(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, messages, session.Config{KeepAlive: -1})
		granted := messages.Limits.Window - session.ControlReserve
		goWrite(s, pattern(1<<20))
		data := 0
		for m := p.recv(); m != nil; m = p.recv() {
			p.dropped = 0 // no word of what was dealt with
			if m[0] == tData {
				data++
			}
		}
		if want := granted - 1 - session.ControlReserve; data != want { // Negotiate was one
			t.Errorf("%d messages of data with %d credits, one of them used; want %d", data, granted, want)
		}
	})
}

// What is due because of what came while nobody was inside, and finds no room, is sent
// when there is some: nobody else will ask for it.
func TestControlThatFindsNoRoomGoesLater(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		const cost = 8                                                       // of a message in the ring, beside its bytes
		const reserve = session.ControlReserve * (session.MaxControl + cost) // which data leaves
		cfg := ring
		cfg.QueueBytes = 4*(cfg.Limits.MaxMessage+cost) + reserve + cost
		s, _, p := negotiated(t, cfg, session.Config{})
		w := goWrite(s, pattern(1<<20))
		pass(time.Second)
		s.InterruptWrite(true)
		within(t, w)
		p.send(tData, 0, 1) // this and the next use up what it was armed for: the janitor alone looks
		p.expect(tData)
		pass(10 * latency)
		s.InterruptWrite(false)
		writeAll(t, s, pattern(cfg.Limits.MaxMessage-header), cfg.Limits.MaxMessage) // and it is full again
		const asked = reserve/(header+cost) + session.ControlReserve
		for range asked {
			if !p.send(tPing, 0) {
				t.Fatal("no room for a question")
			}
		}
		pass(time.Minute)
		pongs := 0
		for m := p.recv(); m != nil; m = p.recv() {
			if m[0] == tPong {
				pongs++
			}
		}
		if pongs != asked {
			t.Errorf("%d answers to %d questions", pongs, asked)
		}
	})
}

// lateArm is an endpoint at which something happens just before Arm.
type lateArm struct {
	*twin.Endpoint
	then atomic.Pointer[func()] // nil: nothing
}

// before has f called before the next Arm.
func (e *lateArm) before(f func()) { e.then.Store(&f) }

func (e *lateArm) Arm(ev session.Events) {
	if f := e.then.Swap(nil); f != nil {
		(*f)()
	}
	e.Endpoint.Arm(ev)
}

// What becomes due by the very look that a Read takes before it sleeps, and finds no room,
// makes it wait for room too.
func TestControlDueBeforeSleepGoesLater(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		cfg := messages
		cfg.SendQueue = session.ControlReserve + 1
		e := &lateArm{}
		s, _, p := negotiatedOn(t, cfg, session.Config{KeepAlive: -1}, func(inner *twin.Endpoint) session.Endpoint {
			e.Endpoint = inner
			return e
		})
		pass(2 * latency)
		p.Hold(twin.HoldMessages) // what is under way to the peer stays in the session's queue
		for range cfg.SendQueue { // the answers fill it
			if !p.send(tPing, 0) {
				t.Fatal("no room for a question")
			}
		}
		pass(2 * latency)
		asked := make(chan struct{})
		e.before(func() {
			p.send(tPing, 0)
			nap(2 * latency) // it comes before anybody is to be woken for it
			close(asked)
		})
		goRead(s, make([]byte, 1))
		<-asked
		pass(2 * latency)
		began := time.Now()
		p.Hold(0)
		for range cfg.SendQueue + 1 {
			p.expect(tPong)
		}
		if took := time.Since(began); took > time.Millisecond { // the janitor would see it next
			t.Errorf("it came %v after there was room", took)
		}
	})
}

// A Write that waits for credit and looks again and again has stalled once.
func TestStallsAreCountedOnce(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, messages, session.Config{KeepAlive: -1, SendBudget: 1})
		p.send(tCredit, 0)
		pass(time.Second)
		goWrite(s, pattern(1<<20))
		for want := range uint64(3) {
			for range 5 { // it is woken, and looks
				pass(time.Second)
				p.send(tUrgent, 0, 'u')
			}
			pass(time.Second)
			if got := s.Stats().Stalls; got != want+1 {
				t.Errorf("%d stalls, want %d", got, want+1)
			}
			for m := p.recv(); m != nil; m = p.recv() { // all that it could send
			}
			p.send(tCredit, 0)
		}
	})
}

// A peer that asks on and does not take the answers costs the connection: what waits for
// room is bounded, and nothing of it is left out.
func TestMoreQuestionsThanAnswersFit(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, ring, session.Config{})
		goWrite(s, pattern(1<<20))
		pass(time.Second)
		for range 1000 {
			if !p.send(tPing, 0) {
				t.Fatal("no room for a question")
			}
		}
		pass(time.Second)
		_, err := s.WriteUrgent([]byte("alive?"))
		wantErr(t, "the connection", err, syscall.ECONNRESET)
	})
}

// On shared memory a peer can change a message after it was looked at: what Read finds
// in it is checked again.
func TestMessageThatChangesWhileItIsKept(t *testing.T) {
	for name, tt := range map[string]struct {
		length int  // of Data, 0: a Fill
		offer  bool // behind it
		change func(m []byte)
	}{
		"a type without payload":       {100, false, func(m []byte) { m[0] = tPing }},
		"an offer that nobody made":    {100, false, func(m []byte) { m[0] = tOfferRead }},
		"an offer that is too short":   {1, true, func(m []byte) { m[0] = tOfferWrite }},
		"a Fill of more than is there": {0, false, func(m []byte) { le.PutUint32(m[header:], 50_000) }},
		"a Fill of nothing":            {0, false, func(m []byte) { le.PutUint32(m[header:], 0) }},
		"a Fill that nobody sent":      {100, false, func(m []byte) { m[0] = tFill }},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				s, e, p := negotiated(t, boxed, session.Config{KeepAlive: -1})
				if tt.length > 0 {
					p.send(tData, 0, pattern(tt.length)...)
				} else {
					p.ask()
					p.send(tFill, 0, u64(100)...)
				}
				if tt.offer {
					p.send(tOfferWrite, 0, u64(1, 100_000)...)
				}
				pass(time.Second) // nobody reads, so that it is kept
				tt.change(e.Front())
				_, err := s.Read(make([]byte, 1000))
				wantErr(t, "Read", err, syscall.ECONNRESET)
			})
		})
	}
}

func TestConcurrentWritesDoNotMix(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		const writers, size = 8, 30_000
		a, b, _, _ := pair(t, cfg, session.Config{})
		for i := range writers {
			go a.Write(bytes.Repeat([]byte{byte(i)}, size))
		}
		got := readFull(t, b, writers*size)
		for i := range writers {
			part := got[i*size:][:size]
			if changed(part, part[0]) >= 0 {
				t.Errorf("bytes of several Writes in one")
			}
		}
	})
}

// WriteBuffers is one Write: in order, and small pieces share messages.
func TestWriteBuffers(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		a, b, _, _ := pair(t, cfg, session.Config{})
		data := pattern(120_000)
		var v [][]byte
		for rest := data; len(rest) > 0; {
			n := min(len(rest), 1+len(v)*len(v)%20_000)
			v, rest = append(v, rest[:n]), rest[n:]
		}
		v = append(v, nil, []byte{})
		want := len(v)
		done := make(chan result, 1)
		go func() { n, err := a.WriteBuffers(v); done <- result{int(n), err} }()
		if got := readFull(t, b, len(data)); !bytes.Equal(got, data) {
			t.Error("wrong bytes")
		}
		if r := within(t, done); r.n != len(data) || r.err != nil {
			t.Errorf("WriteBuffers: %+v", r)
		}
		if len(v) != want {
			t.Error("WriteBuffers changed its argument")
		}
		before := a.Stats().MessagesSent
		small := bytes.SplitAfter(bytes.Repeat([]byte("x "), 100), []byte(" "))
		if _, err := a.WriteBuffers(small); err != nil {
			t.Fatal(err)
		}
		if sent := a.Stats().MessagesSent - before; sent > 2 {
			t.Errorf("%d messages for 100 small slices", sent)
		}
	})
}

// Nothing more comes with empty slices at the end: a process that ends behind them has
// ended in order.
func TestWriteBuffersWithNothingAtTheEnd(t *testing.T) {
	for name, tt := range map[string]struct {
		cfg twin.Config
		v   [][]byte
	}{
		"a message":      {ring, [][]byte{pattern(5000), nil}},
		"packed":         {ring, [][]byte{pattern(100), nil, {}}},
		"behind small":   {ring, [][]byte{pattern(100), nil, pattern(5000), nil, {}}},
		"nothing before": {ring, [][]byte{nil, {}}},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				a, b, ea, _ := pair(t, tt.cfg, session.Config{})
				want := bytes.Join(tt.v, nil)
				if n, err := a.WriteBuffers(tt.v); int(n) != len(want) || err != nil {
					t.Fatalf("WriteBuffers: %d, %v", n, err)
				}
				pass(time.Second)
				ea.Kill()
				if got, err := io.ReadAll(readerOf(b)); err != nil || !bytes.Equal(got, want) {
					t.Errorf("%d bytes of %d, %v", len(got), len(want), err)
				}
			})
		})
	}
}

// Reads and Writes of nothing do not wait.
func TestEmptySlices(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, _, _, _ := pair(t, messages, session.Config{})
		if r := within(t, goRead(a, nil)); r.n != 0 || r.err != nil {
			t.Errorf("Read: %+v", r)
		}
		if r := within(t, goWrite(a, nil)); r.n != 0 || r.err != nil {
			t.Errorf("Write: %+v", r)
		}
	})
}

// Close waits for a peer that reads slowly: the process may end behind it, and what it
// holds would be lost.
func TestCloseWaitsForASlowReader(t *testing.T) {
	for name, cfg := range map[string]twin.Config{"inbox": boxed, "messages": messages} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				a, b, ea, _ := pair(t, cfg, session.Config{CloseTimeout: time.Hour})
				data := pattern(500_000)
				over := make(chan []byte)
				go func() {
					var all []byte
					for part := make([]byte, 2000); ; {
						n, err := b.Read(part)
						all = append(all, part[:n]...)
						if err != nil {
							over <- all
							return
						}
						pass(50 * time.Millisecond)
					}
				}()
				if n, err := a.Write(data); n != len(data) || err != nil {
					t.Fatal(n, err)
				}
				began := time.Now()
				a.Close()
				t.Logf("Close took %v", time.Since(began))
				ea.Kill()
				if got := <-over; !bytes.Equal(got, data) {
					t.Errorf("%d bytes of %d were read", len(got), len(data))
				}
			})
		})
	}
}

// A peer that does not read does not hold up Close for long, nor its memory
// for ever.
func TestCloseToAPeerThatDoesNotRead(t *testing.T) {
	for name, cfg := range map[string]twin.Config{"by read": byRead, "messages": messages} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				s, e, p := negotiated(t, cfg, session.Config{CloseTimeout: 20 * time.Second, KeepAlive: -1})
				_ = p
				w := goWrite(s, pattern(1<<20))
				pass(time.Second)
				began := time.Now()
				s.Close()
				if took := time.Since(began); took > 3*time.Second {
					t.Errorf("Close took %v", took)
				}
				within(t, w)
				<-s.Closed()
				if took := time.Since(began); took > 23*time.Second {
					t.Errorf("closed after %v", took)
				}
				if !e.Closed() {
					t.Error("the endpoint was not given back")
				}
			})
		})
	}
}

// An endpoint without room for the negotiation message has some later: that ends nothing.
func TestNegotiationWaitsForRoom(t *testing.T) {
	for name, cfg := range map[string]twin.Config{"messages": messages, "ring": ring} {
		t.Run(name, func(t *testing.T) {
			for seed := range uint64(20) {
				inBubble(t, func(t *testing.T) {
					cfg.Seed, cfg.Faults.Tight = seed, 0.9
					ea, eb := twins(t, cfg)
					a, b := session.New(ea, session.Config{KeepAlive: -1}), session.New(eb, session.Config{KeepAlive: -1})
					ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
					defer cancel()
					other := make(chan error, 1)
					go func() { other <- b.Negotiate(ctx) }()
					if err := errors.Join(a.Negotiate(ctx), <-other); err != nil {
						t.Error(err)
					}
					for _, s := range []*session.Session{a, b} {
						s.Abort()
						<-s.Closed()
					}
					idle()
				})
			}
		})
	}
}
