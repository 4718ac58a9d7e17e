package session_test

import (
	"errors"
	"io"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/session"
)

// step is something that the peer sends.
type step func(*raw)

func says(typ, flags byte, body ...byte) step {
	return func(p *raw) { p.send(typ, flags, body...) }
}

func givesCredit(v uint32) step {
	return func(p *raw) {
		was := p.dropped
		p.dropped = v
		p.send(tCredit, 0)
		p.dropped = was
	}
}

// unusual has what violates the protocol, and what is only unexpected (fine).
var unusual = map[string]struct {
	cfg   twin.Config
	steps []step
	fine  bool
}{
	"unknown type":                    {messages, []step{says(99, 0)}, false},
	"type zero":                       {messages, []step{says(0, 0)}, false},
	"the largest type":                {messages, []step{says(255, 0)}, false},
	"a second negotiation":            {messages, []step{says(tNegotiate, 0, parameters(version, 24, 4096, 0)...)}, false},
	"a header cut short":              {messages, []step{func(p *raw) { p.ReserveControl(4); p.CommitControl(4) }}, false},
	"an offer cut short":              {byRead, []step{says(tOfferRead, 0, u64(1, 2)...)}, false},
	"an offer of nothing":             {byRead, []step{says(tOfferRead, 0, u64(1, 1<<40, 7, 0)...)}, false},
	"an endless offer":                {byRead, []step{says(tOfferRead, 0, u64(1, 1<<40, 7, 1<<63)...)}, false},
	"an offer to who cannot read":     {byBuffer, []step{says(tOfferRead, 0, u64(1, 1<<40, 7, 100_000)...)}, false},
	"an offer of version 1":           {byBuffer, []step{says(5, 0, u64(1, 100_000)...)}, false},
	"data behind shutdown":            {messages, []step{says(tShutdown, 0), says(tData, 0, 1)}, false},
	"shutdown behind shutdown":        {messages, []step{says(tShutdown, 0), says(tShutdown, 0)}, false},
	"data behind close":               {messages, []step{says(tClose, 0), says(tData, 0, 1)}, false},
	"close behind close":              {messages, []step{says(tClose, 0), says(tClose, 0)}, false},
	"credit that jumps":               {messages, []step{givesCredit(1 << 30)}, false},
	"credit that goes back":           {messages, []step{givesCredit(^uint32(0))}, false},
	"credit for what was not sent":    {messages, []step{givesCredit(20)}, false},
	"urgent data of nothing":          {messages, []step{says(tUrgent, 0)}, false},
	"a note of no use":                {messages, []step{says(tNote, 0, 1)}, false},
	"a cancel cut short":              {byRead, []step{says(tCancelRead, 0)}, false},
	"unknown flags":                   {messages, []step{says(tData, 0xFE, 1), says(tPing, 0xFF)}, true},
	"something in the zero bytes":     {messages, []step{func(p *raw) { b := p.Reserve(9, 9); copy(b, []byte{tData, 0, 9, 9, 0, 0, 0, 0, 1}); p.Commit(9) }}, true},
	"more than a type needs":          {messages, []step{says(tPing, 0, 1, 2, 3, 4), says(tShutdown, 0, 9)}, true},
	"empty data":                      {messages, []step{says(tData, 0)}, true},
	"done for no offer":               {byRead, []step{says(tReadDone, 0, u64(9, 100)...)}, true},
	"cancel for no offer":             {byRead, []step{says(tCancelRead, 0, u64(9)...)}, true},
	"a pong that was not asked for":   {messages, []step{says(tPong, 0)}, true},
	"an acknowledgement out of place": {messages, []step{says(tCloseAck, 0)}, true},
	"close behind shutdown":           {messages, []step{says(tShutdown, 0), says(tClose, 0)}, true},
}

// A violation of the protocol ends the connection at both ends. Something that is only unexpected does
// not.
func TestAViolationEndsTheConnection(t *testing.T) {
	for name, tt := range unusual {
		inOrder := strings.HasSuffix(name, "behind close") || strings.HasSuffix(name, "behind shutdown")
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
				pass(time.Second) // messages are acted on even without a Read (D3)
				n, err := s.WriteUrgent([]byte("alive?"))
				if alive := err == nil && n == 6; alive != tt.fine && !errors.Is(err, syscall.EPIPE) {
					t.Fatalf("the connection lives: %v (%v), want %v", alive, err, tt.fine)
				}
				if !tt.fine {
					endsByViolation(t, s, inOrder)
				}
			})
		}
		t.Run(name, func(t *testing.T) { check(t, false) })
		t.Run(name+", to a Read", func(t *testing.T) { check(t, true) })
	}
}

// endsByViolation reads the stream to its end. With inOrder the peer's end came before the violation,
// and is what the Read finds.
func endsByViolation(t *testing.T, s *session.Session, inOrder bool) {
	t.Helper()
	var err error
	for err == nil {
		_, err = s.Read(make([]byte, 100))
	}
	if inOrder {
		wantErr(t, "Read of a stream that had ended in order", err, io.EOF)
		return
	}
	wantErr(t, "Read", err, syscall.ECONNRESET)
	if !strings.Contains(err.Error(), "protocol") {
		t.Errorf("Read: %v: does not say who is to blame", err)
	}
}

// The rules of an open offer.
func TestAViolationOfOffersEndsTheConnection(t *testing.T) {
	// hold makes an offer of memory that exists, and whose reads do not complete.
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
		"shutdown behind it":   {0, func(p *raw) { hold(p, 1); p.send(tShutdown, 0) }},
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
				endsByViolation(t, s, false)
			})
		})
	}
}

// A peer may fill no more than the inbox has room for, and only while there is one.
func TestAViolationOfInboxesEndsTheConnection(t *testing.T) {
	for name, say := range map[string]func(*session.Session, *raw){
		"a Fill without an inbox": func(_ *session.Session, p *raw) { p.send(tFill, 0, u64(1)...) },
		"a Fill of nothing":       func(_ *session.Session, p *raw) { p.ask(); p.send(tFill, 0, u64(0)...) },
		"a Fill beyond":           func(_ *session.Session, p *raw) { p.send(tFill, 0, u64(p.ask().Len+1)...) },
		"two that are too much": func(_ *session.Session, p *raw) {
			p.ask()
			p.send(tFill, 0, u64(40_000)...)
			p.send(tFill, 0, u64(10_001)...)
		},
		"a Fill behind leaving": func(_ *session.Session, p *raw) { p.ask(); p.send(tLeaveInbox, 0); p.send(tFill, 0, u64(1)...) },
		"a Fill behind leaving what is unread": func(_ *session.Session, p *raw) {
			p.ask()
			p.send(tFill, 0, u64(1)...)
			p.send(tLeaveInbox, 0)
			p.send(tFill, 0, u64(1)...)
		},
		"a Fill cut short": func(_ *session.Session, p *raw) { p.ask(); p.send(tFill, 0, 1, 0, 0) },
		"a second inbox":   func(_ *session.Session, p *raw) { p.ask(); p.send(tAskInbox, 0) },
		"a third inbox": func(_ *session.Session, p *raw) {
			d := p.ask()
			p.fill(d, 0, make([]byte, 10))
			p.send(tLeaveInbox, 0)
			p.send(tAskInbox, 0)
			p.send(tAskInbox, 0)
		},
		"leaving what there is not": func(_ *session.Session, p *raw) { p.send(tLeaveInbox, 0) },
		"leaving twice": func(_ *session.Session, p *raw) {
			p.ask()
			p.send(tFill, 0, u64(1)...)
			p.send(tLeaveInbox, 0)
			p.send(tLeaveInbox, 0)
		},
		"an inbox not asked for": func(_ *session.Session, p *raw) { p.send(tInbox, 0, u64(0, 1<<40, 7, 1000)...) },
		"an endless inbox": func(s *session.Session, p *raw) {
			goWrite(s, pattern(10_000))
			p.expect(tAskInbox)
			p.send(tInbox, 0, u64(0, 1<<40, 7, 1<<40)...)
		},
		"emptied more than was filled": func(s *session.Session, p *raw) {
			p.open(s, 1000)
			goWrite(s, pattern(10_000))
			p.expect(tFill)
			p.send(tEmptied, 0, u64(0, 1001)...)
		},
		"filled again": func(s *session.Session, p *raw) {
			in := p.open(s, 50_000)
			goWrite(s, pattern(10_000))
			in.read(10_000)
			in.emptied()
			p.send(tEmptied, 0, u64(0, 9_999)...)
		},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				s, _, p := negotiated(t, buffered, session.Config{KeepAlive: -1, ReceiveBudget: 50_000})
				say(s, p)
				pass(time.Second)
				endsByViolation(t, s, false)
			})
		})
	}
}

// What comes after a violation is ignored, even if the same poll finds it.
func TestWhatComesBehindAViolationDoesNotCount(t *testing.T) {
	violations := map[string]func(p *raw){
		"of this end's stream": func(p *raw) { p.send(tInbox, 0, u64(0, 0, 0, 100)...) },
		"of the peer's stream": func(p *raw) { p.send(tLeaveInbox, 0) },
	}
	for name, violate := range violations {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				s, e, p := negotiated(t, buffered, session.Config{})
				e.Hold(twin.HoldMessages)
				violate(p)
				p.send(tData, 0, 'x')
				p.send(tShutdown, 0)
				pass(time.Second)
				e.Hold(0)
				n, err := s.Read(make([]byte, 10))
				if n != 0 {
					t.Errorf("Read %d bytes", n)
				}
				wantErr(t, "Read", err, syscall.ECONNRESET)
			})
		})
	}
}

// What had arrived before a violation is read first.
func TestWhatArrivedBeforeAViolationIsRead(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, buffered, session.Config{KeepAlive: -1})
		d := p.ask()
		p.send(tData, 0, []byte("one ")...)
		p.fill(d, 0, []byte("two"))
		p.send(99, 0)
		pass(time.Second)
		got, err := io.ReadAll(readerOf(s))
		wantErr(t, "Read", err, syscall.ECONNRESET)
		if string(got) != "one two" {
			t.Errorf("%q was read before that", got)
		}
	})
}

// A peer that sends Pings and does not take the Pongs loses the connection: the number of control
// messages that wait for room is bounded, and none is dropped.
func TestOwedControlIsBounded(t *testing.T) {
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
		endsByViolation(t, s, false)
	})
}

// On shared memory a peer can change a message after it was checked, so Read checks it again.
func TestAKeptMessageIsCheckedAgain(t *testing.T) {
	for name, tt := range map[string]struct {
		length int  // of a Data; 0: it is a Fill
		offer  bool // an offer follows
		change func(m []byte)
	}{
		"a type without payload":       {100, false, func(m []byte) { m[0] = tPing }},
		"an offer that nobody made":    {100, false, func(m []byte) { m[0] = tOfferRead }},
		"an offer that is too short":   {1, true, func(m []byte) { m[0] = tOfferRead }},
		"a Fill of more than is there": {0, false, func(m []byte) { le.PutUint32(m[header:], 50_000) }},
		"a Fill of nothing":            {0, false, func(m []byte) { le.PutUint32(m[header:], 0) }},
		"a Fill that nobody sent":      {100, false, func(m []byte) { m[0] = tFill }},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				s, e, p := negotiated(t, buffered, session.Config{KeepAlive: -1})
				if tt.length > 0 {
					p.send(tData, 0, pattern(tt.length)...)
				} else {
					p.ask()
					p.send(tFill, 0, u64(100)...)
				}
				if tt.offer {
					d, _ := p.Expose(make([]byte, 100_000), session.RemoteRead)
					p.send(tOfferRead, 0, u64(1, d.Addr, d.Key, d.Len)...)
				}
				pass(time.Second) // nobody reads, so the message is kept
				tt.change(e.Front())
				_, err := s.Read(make([]byte, 1000))
				wantErr(t, "Read", err, syscall.ECONNRESET)
			})
		})
	}
}

// Such a Read fails even if the stream has ended after the message: it neither waits nor returns the
// end.
func TestAMessageThatChangesBeforeTheEndIsCheckedAgain(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, e, p := negotiated(t, ring, session.Config{})
		p.send(tData, 0, pattern(100)...)
		p.send(tShutdown, 0)
		pass(time.Second)
		e.Front()[0] = tPing
		r := within(t, goRead(s, make([]byte, 1000)))
		if r.n != 0 {
			t.Errorf("Read %d bytes", r.n)
		}
		wantErr(t, "Read", r.err, syscall.ECONNRESET)
	})
}

// A Fill of bytes that were never written shows zeros, and not what other connections have left in the
// memory.
func TestAFillOfWhatWasNotWrittenShowsZeros(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, buffered, session.Config{KeepAlive: -1})
		if p.ask().Len < 1000 {
			t.Fatal("no inbox")
		}
		p.send(tFill, 0, u64(1000)...)
		if got := readFull(t, s, 1000); changed(got, 0) >= 0 {
			t.Errorf("it shows %x…", got[:8])
		}
	})
}
