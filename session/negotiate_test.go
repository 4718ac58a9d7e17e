package session_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/session"
)

// N1, N2: the first message is the Negotiate, of at most 256 bytes, and has the number of messages that
// the peer may send.
func TestTheFirstMessageIsNegotiation(t *testing.T) {
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

// N3: a Negotiate that comes long before the acceptor polls is kept.
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

// N4: Negotiate returns when the peer's message has come, not before, and its context bounds the wait.
func TestNegotiateWaitsForThePeersMessage(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := rawPair(t, byRead, session.Config{})
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		wantErr(t, "Negotiate with a silent peer", s.Negotiate(ctx), context.DeadlineExceeded)
		if n, err := p.send(tNegotiate, 0, parameters(version, 24, 4096, 0)...), error(nil); !n || err != nil {
			t.Fatal("no room")
		}
		negotiate(t, s)
	})
}

// A first message of another protocol or version is refused with a reason. What a later version may add
// is ignored.
func TestAStrangerIsRefusedWithAReason(t *testing.T) {
	good := parameters(version, 24, 4096, 0)
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
		"another version":                 {tNegotiate, with(4, version+1), session.ReasonVersion},
		"an old version":                  {tNegotiate, with(4, version-1), session.ReasonVersion},
		"another magic":                   {tNegotiate, with(0, 'H', 'T', 'T', 'P'), session.ReasonProtocol},
		"data first":                      {tData, []byte("GET / HTTP/1.1\r\n"), session.ReasonProtocol},
		"an unknown type first":           {200, good, session.ReasonProtocol},
		"a short message":                 {tNegotiate, good[:39], session.ReasonProtocol},
		"an empty message":                {tNegotiate, nil, session.ReasonProtocol},
		"too few credits":                 {tNegotiate, parameters(version, 8, 4096, 0), session.ReasonProtocol},
		"no credits":                      {tNegotiate, parameters(version, 0, 4096, 0), session.ReasonProtocol},
		"more credits than can be":        {tNegotiate, parameters(version, 1<<20+1, 4096, 0), session.ReasonProtocol},
		"buffers too small for control":   {tNegotiate, parameters(version, 24, 255, 0), session.ReasonProtocol},
		"all capabilities there could be": {tNegotiate, parameters(version, 24, 4096, ^uint32(0)), session.ReasonNone},
		"something in the zero bytes":     {tNegotiate, with(20, 1, 2, 3, 4), session.ReasonNone},
		"something in another zero":       {tNegotiate, with(6, 1), session.ReasonNone},
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

// An end with a ring refuses a peer with credits.
func TestARingTakesNoCredits(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := rawPair(t, ring, session.Config{})
		p.send(tNegotiate, 0, parameters(version, 24, 4096, 0)...)
		var u *session.Unavailable
		if err := s.Negotiate(context.Background()); !errors.As(err, &u) || u.Reason != session.ReasonProtocol {
			t.Errorf("Negotiate: %v", err)
		}
	})
}

// Negotiate fails when the peer ends the connection, in whatever way.
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

// If the endpoint has no room for Negotiate yet, the session waits for room.
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

// An accepting end sends its Negotiate only when the dialer's has come, and nothing before.
func TestAcceptingEndIsSilentUntilTheDialerNegotiates(t *testing.T) {
	for name, cfg := range forms {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				s, _, p := rawPair(t, cfg, session.Config{Accepting: true})
				negotiated := make(chan error, 1)
				go func() { negotiated <- s.Negotiate(context.Background()) }()
				pass(time.Second)
				var ev session.Event
				if p.Poll(&ev) {
					t.Fatalf("before the dialer: %x", ev.Msg)
				}
				credits := uint32(max(cfg.Limits.Window-session.ControlReserve, 0))
				p.send(tNegotiate, 0, parameters(version, credits, 4096, 0)...)
				if m := p.recv(); m[0] != tNegotiate || le.Uint16(m[header+6:]) != 0 {
					t.Errorf("the answer is %x", m)
				}
				if err := <-negotiated; err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// noRoom is an endpoint without room for control messages until room is set.
type noRoom struct {
	*twin.Endpoint
	room atomic.Bool
}

func (e *noRoom) ReserveControl(n int) []byte {
	if !e.room.Load() {
		return nil
	}
	return e.Endpoint.ReserveControl(n)
}

// What has come after the peer's Negotiate is not handled, whoever is woken for it, until this end's
// Negotiate has been sent: a reply would overtake it.
func TestNothingIsTakenBeforeNegotiationHasBeenSent(t *testing.T) {
	for name, cfg := range forms {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				var s *session.Session
				var e *noRoom
				s, _, p := rawPairOn(t, cfg, session.Config{Accepting: true, OnNote: func(note []byte) {
					e.room.Store(true)
					s.SendNote(note)
				}}, func(inner *twin.Endpoint) session.Endpoint {
					e = &noRoom{Endpoint: inner}
					return e
				})
				negotiated := make(chan error, 1)
				go func() { negotiated <- s.Negotiate(context.Background()) }()
				p.send(tNegotiate, 0, parameters(version, uint32(max(cfg.Limits.Window-session.ControlReserve, 0)), 4096, 0)...)
				p.send(tNote, 0, 7)
				pass(time.Second)
				s.Wake(session.RecvReady)
				pass(time.Second)
				e.room.Store(true)
				s.Wake(session.SendReady)
				if m := p.recv(); m[0] != tNegotiate {
					t.Errorf("the first message is %x", m)
				}
				p.expect(tNote)
				if err := <-negotiated; err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// FuzzNegotiate: whatever the peer's first message is, either Negotiate fails, or its
// parameters are in their ranges and the session keeps to them.
func FuzzNegotiate(f *testing.F) {
	kinds := []twin.Config{ring, byRead, byBuffer, messages, buffered}
	f.Fuzz(func(t *testing.T, kind byte, first []byte) {
		bubble(t, "the input above", func(t *testing.T) {
			cfg := kinds[int(kind)%len(kinds)]
			s, _, p := rawPair(t, cfg, session.Config{CloseTimeout: time.Second})
			first = first[:min(len(first), cfg.Limits.MaxMessage)]
			if len(first) > 0 && !p.sendBytes(first) {
				t.Fatal("no room for a first message")
			}
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			err := s.Negotiate(ctx)
			valid := validParameters(first, cfg.Limits.Window == 0)
			if (err == nil) != valid {
				t.Fatalf("% x: %v", first, err)
			}
			if err == nil && le.Uint32(first[header+8:]) <= uint32(cfg.Limits.Window) { // otherwise this peer lacks the receive buffers that it announces
				keepsTo(t, s, p, le.Uint32(first[header+8:]), le.Uint32(first[header+12:]))
			}
		})
	})
}

// validParameters decides by docs/PROTOCOL.md whether a first message is valid.
func validParameters(m []byte, ring bool) bool {
	if len(m) < header+40 || m[0] != tNegotiate || string(m[header:header+4]) != "SANc" || le.Uint16(m[header+4:]) != version {
		return false
	}
	credits, maxMsg := le.Uint32(m[header+8:]), le.Uint32(m[header+12:])
	if ring != (credits == 0) || maxMsg < 256 {
		return false
	}
	return ring || credits >= 16 && credits <= 1<<20
}

// keepsTo checks that a session sends no message larger than maxMsg, and no more messages than credits,
// while the peer deals with none. If credits is 0, the number is not limited.
func keepsTo(t *testing.T, s *session.Session, p *raw, credits, maxMsg uint32) {
	w := goWrite(s, pattern(50_000))
	n := uint32(0)
	for m := p.recv(); m != nil; m = p.recv() {
		if uint32(len(m)) > maxMsg {
			t.Fatalf("a message of %d bytes, of at most %d", len(m), maxMsg)
		}
		if m[0] != tCredit && m[0] != tNegotiate {
			n++
		}
	}
	if credits > 0 && n > credits {
		t.Fatalf("%d messages by %d credits", n, credits)
	}
	s.Abort()
	within(t, w)
}

// An end whose memory cannot serve as an inbox or be read into by RDMA announces neither, and opens no
// inbox for a peer that requests one nevertheless.
func TestARingAnnouncesNoMemory(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		_, e, p := rawPair(t, ring, session.Config{})
		if m := p.recv(); le.Uint32(m[header+16:]) != 0 {
			t.Errorf("it announces %x", m)
		}
		p.send(tNegotiate, 0, parameters(version, 0, 4096, 3)...)
		p.send(tAskInbox, 0)
		pass(time.Second)
		if left := e.Left(); left.Allocated != 0 {
			t.Errorf("%+v", left)
		}
	})
}

// An end that is closed before it was negotiated ends in order if its peer can tell that from a bad
// negotiation, and otherwise at once, without sending anything.
func TestCloseBeforeNegotiation(t *testing.T) {
	for name, tt := range map[string]struct {
		cfg      twin.Config
		acceptor bool
		inOrder  bool
	}{
		"dialer, ring":     {ring, false, true},
		"dialer, credits":  {messages, false, false},
		"acceptor, ring":   {ring, true, false},
		"acceptor, credit": {messages, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				ea, eb := twins(t, tt.cfg)
				if tt.acceptor {
					ea, eb = eb, ea
				}
				closes := session.New(ea, withoutKeepAlive(session.Config{Accepting: tt.acceptor}))
				other := session.New(eb, withoutKeepAlive(session.Config{Accepting: !tt.acceptor}))
				defer idle()
				defer other.Abort()
				began := time.Now()
				closes.Close()
				if <-closes.Closed(); time.Since(began) > 0 {
					t.Errorf("Close took %v", time.Since(began))
				}
				err := other.Negotiate(t.Context())
				if refused := (*session.Unavailable)(nil); errors.As(err, &refused) {
					t.Errorf("Negotiate: %v", err)
				}
				if !tt.inOrder {
					return
				}
				if err != nil {
					t.Fatal(err)
				}
				_, err = other.Read(make([]byte, 1))
				wantErr(t, "Read", err, io.EOF)
			})
		})
	}
}

// Close does not wait for a Negotiate that begins, on another goroutine, after Close has ended all
// operations. As Close retires the endpoint, Negotiate must not use it any more.
func TestNegotiateBesideClose(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		e := &secondErr{}
		s, _, p := rawPairOn(t, ring, session.Config{}, func(under *twin.Endpoint) session.Endpoint {
			e.Endpoint = under
			return e
		})
		p.send(tNegotiate, 0, parameters(version, 0, 4096, 0)...)
		pass(2 * latency)
		err := errors.New("Close has not looked at the endpoint")
		act := func() { err = s.Negotiate(context.Background()) }
		e.act.Store(&act)
		e.asked.Store(1) // so that act runs in Close's first look after the end of all operations
		if err := s.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
		wantErr(t, "Negotiate", err, session.ErrClosed)
	})
}

// Fail ends a Negotiate that waits for the peer's message. Whatever the peer has sent by then is lost.
func TestNegotiateEndsWithItsSession(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		s, _, _ := rawPair(t, cfg, session.Config{})
		got := make(chan result, 1)
		go func() { got <- result{0, s.Negotiate(context.Background())} }()
		pass(time.Second)
		fault := errors.New("a fault of the test's")
		s.Fail(fault)
		err := within(t, got).err
		wantErr(t, "Negotiate", err, fault)
		wantErr(t, "Negotiate", err, session.ErrLost)
	})
}

// A Negotiate that Close ends looks at what has come before: bytes that follow the negotiation are unread
// then, which the peer finds.
func TestCloseFindsWhatHasComeBesideNegotiate(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		ea, eb := twins(t, ring)
		e := &slowArrival{lateArm: lateArm{Endpoint: ea}}
		e.late.Store(true)
		a, b := session.New(e, session.Config{}), session.New(eb, session.Config{})
		defer idle()
		defer b.Abort()
		got := make(chan result, 1)
		go func() { got <- result{0, a.Negotiate(context.Background())} }()
		negotiate(t, b)
		if _, err := b.Write([]byte("unread")); err != nil {
			t.Fatal(err)
		}
		pass(time.Second)
		e.late.Store(false)
		a.Close()
		within(t, got)
		pass(time.Second)
		_, err := b.Read(make([]byte, 1))
		wantErr(t, "the peer's Read", err, syscall.ECONNRESET)
	})
}

// failsInErr has no room for control messages, and something happens when the session first looks at
// how it is.
type failsInErr struct {
	*twin.Endpoint
	act func()
}

func (e *failsInErr) ReserveControl(int) []byte { return nil }

func (e *failsInErr) Err() error {
	if act := e.act; act != nil {
		e.act = nil
		act()
	}
	return e.Endpoint.Err()
}

// A failure that comes in the middle of Negotiate's look is what that returns.
func TestNegotiateEndsWithItsSessionInALook(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		e := &failsInErr{}
		s, _, _ := rawPairOn(t, ring, session.Config{}, func(under *twin.Endpoint) session.Endpoint {
			e.Endpoint = under
			return e
		})
		fault := errors.New("a fault of the test's")
		e.act = func() { s.Fail(fault) }
		wantErr(t, "Negotiate", s.Negotiate(context.Background()), fault)
	})
}
