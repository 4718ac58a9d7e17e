package session_test

import (
	"io"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/session"
	"github.com/sanconn/san/session/twin"
)

// What the peer had written before it left is read, though this end was writing to its
// memory by RDMA meanwhile.

const reply = "the reply"

// wantReply reads the reply, and behind it end.
func wantReply(t *testing.T, s *session.Session, end error) {
	t.Helper()
	b := make([]byte, 100)
	n, err := s.Read(b)
	if string(b[:n]) != reply || err != nil {
		t.Errorf("%q, %v", b[:n], err)
	}
	n, err = s.Read(b)
	if n != 0 {
		t.Errorf("%q behind it", b[:n])
	}
	wantErr(t, "behind it", err, end)
}

// The peer's process ends: an RDMA write to its inbox fails, and which of that and the
// reply is polled first is chance.
func TestReplyBeforeAFailedRDMAWrite(t *testing.T) {
	for seed := range uint64(6) {
		inBubble(t, func(t *testing.T) {
			cfg := boxed
			cfg.Seed = seed
			s, e, p := negotiated(t, cfg, session.Config{KeepAlive: -1})
			asks := goWrite(s, pattern(20_000))
			for m := p.recv(); m == nil || m[0] != tAskInbox; m = p.recv() {
				if m == nil {
					t.Fatal("no AskInbox")
				}
			}
			within(t, asks)
			d, err := p.Expose(make([]byte, 1<<20), session.RemoteWrite)
			if err != nil {
				t.Fatal(err)
			}
			for p.Poll(&session.Event{}) {
				p.Drop()
				p.dropped++
			}
			p.send(tInbox, 0, u64(0, d.Addr, d.Key, d.Len)...)
			pass(time.Second)
			e.Hold(twin.HoldWrites)
			if _, err := s.Write(pattern(20_000)); err != nil {
				t.Fatal(err)
			}
			if s.Stats().OfferedBytesSent == 0 {
				t.Fatal("it did not go to the inbox")
			}
			p.send(tData, 0, []byte(reply)...)
			p.Kill()
			nap(3 * latency) // both are here, and nobody has looked
			wantReply(t, s, syscall.ECONNRESET)
		})
	}
}

// The peer has granted memory, and leaves while it is written to.
func TestReplyBeforeAGrantIsLost(t *testing.T) {
	for name, tt := range map[string]struct {
		leave      func(*session.Session, *twin.Endpoint)
		write, end error
	}{
		"closed for reading, and closed": {func(s *session.Session, _ *twin.Endpoint) { s.CloseRead(); go s.Close() }, syscall.EPIPE, io.EOF},
		"closed with something unread":   {func(s *session.Session, _ *twin.Endpoint) { go s.Close() }, syscall.EPIPE, syscall.ECONNRESET},
		"died":                           {func(_ *session.Session, e *twin.Endpoint) { e.Kill() }, syscall.ECONNRESET, syscall.ECONNRESET},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				a, b, ea, eb := pair(t, byWrite, session.Config{ReceiveBudget: 1, KeepAlive: -1, Disable: session.FeatureRDMARead})
				eb.Hold(twin.HoldWrites)
				w := goWrite(b, pattern(50_000))
				pass(time.Second)
				if _, err := a.Write([]byte(reply)); err != nil {
					t.Fatal(err)
				}
				pass(time.Second)
				tt.leave(a, ea)
				pass(time.Second)
				select {
				case <-a.Closed(): // not of one that died
					t.Error("memory was given back that the peer writes to")
				default:
				}
				eb.Hold(0)
				wantErr(t, "Write", within(t, w).err, tt.write)
				wantReply(t, b, tt.end)
			})
		})
	}
}

// CloseWrite that finds no room in the ring, of a session that the janitor looks after no
// more, is told to the peer when there is some. So is Close.
func TestShutdownWithoutRoom(t *testing.T) {
	t.Run("CloseWrite", func(t *testing.T) { withoutRoom(t, (*session.Session).CloseWrite, tShutdown) })
	t.Run("Close", func(t *testing.T) { withoutRoom(t, (*session.Session).Close, tClose) })
}

func withoutRoom(t *testing.T, end func(*session.Session) error, said byte) {
	writes, pongs := -1, -1 // that fill the ring up to control's share, and that too
	for range 2 {
		inBubble(t, func(t *testing.T) {
			cfg := ring
			cfg.QueueBytes = 8 << 10
			s, _, p := negotiated(t, cfg, session.Config{})
			for n := 0; n != writes; n++ {
				w := goWrite(s, make([]byte, 100))
				pass(time.Second)
				s.InterruptWrite(true)
				if r := within(t, w); r.err != nil {
					writes = n
					break
				}
				s.InterruptWrite(false)
			}
			s.InterruptWrite(false)
			for n := 0; n != pongs; n++ {
				before := s.Stats().MessagesSent
				p.send(tPing, 0)
				pass(time.Second)
				if s.Stats().MessagesSent == before {
					pongs = n // now one is owed: the second time there is not
					return
				}
			}
			before := s.Stats().MessagesSent
			if err := end(s); err != nil {
				t.Fatal(err)
			}
			if s.Stats().MessagesSent != before {
				t.Fatal("there was room")
			}
			for {
				m := p.recv()
				if m == nil {
					t.Fatalf("no message of type %d comes, though there is room", said)
				}
				if m[0] == said {
					return
				}
			}
		})
	}
	if writes <= 0 || pongs <= 0 {
		t.Errorf("%d Writes and %d Pongs fill the ring", writes, pongs)
	}
}
