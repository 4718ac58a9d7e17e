package session_test

import (
	"bytes"
	"io"
	"testing"
	"time"

	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/session"
)

// Bytes in the inbox are read at their place in the stream, Emptied reports what was read, and the
// memory stays exposed to the peer until the peer has left and everything was read.
func TestTheInboxIsReadInItsPlace(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, e, p := negotiated(t, buffered, session.Config{KeepAlive: -1, ReceiveBudget: 40_000})
		d := p.ask()
		if d.Len != 40_000 {
			t.Fatalf("an inbox of %d bytes", d.Len)
		}
		data := pattern(40_000)
		p.send(tData, 0, []byte("before ")...)
		p.fill(d, 0, data[:30_000])
		p.send(tData, 0, []byte(" behind")...)
		if got := string(readFull(t, s, 7)); got != "before " {
			t.Errorf("%q", got)
		}
		if got := readFull(t, s, 10_000); !bytes.Equal(got, data[:10_000]) {
			t.Error("wrong bytes")
		}
		if n := le.Uint64(p.expect(tEmptied)[8:]); n != 10_000 {
			t.Errorf("it has read %d bytes of 10,000", n)
		}
		if got := readFull(t, s, 20_007); !bytes.Equal(got, append(bytes.Clone(data[10_000:30_000]), " behind"...)) {
			t.Error("wrong bytes")
		}
		p.expect(tEmptied)
		p.fill(d, 30_000, data[:10_000]) // up to its end
		p.fill(d, 0, data[10_000:20_000])
		p.send(tLeaveInbox, 0)
		pass(time.Second)
		if e.Left().Exposed != 1 {
			t.Fatal("revoked before it was read")
		}
		if got := readFull(t, s, 10_000); !bytes.Equal(got, data[:10_000]) {
			t.Error("wrong bytes")
		}
		p.expect(tEmptied) // sent because the writer's Close may wait for it
		if got := readFull(t, s, 10_000); !bytes.Equal(got, data[10_000:20_000]) {
			t.Error("wrong bytes")
		}
		pass(time.Second)
		if left := e.Left(); left.Exposed != 0 || left.Allocated != 0 {
			t.Errorf("kept: %+v", left)
		}
		if d = p.ask(); d.Len == 0 {
			t.Error("no other inbox")
		}
	})
}

// A peer that sends Fill for bytes which it has not written does not expose what other connections had
// in this memory, neither in its first inbox nor in the next one.
func TestAFalseFillShowsNothingOfOthers(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		const size = 40_000
		s, _, p := negotiated(t, buffered, session.Config{KeepAlive: -1, ReceiveBudget: size})
		for range 2 {
			if d := p.ask(); d.Len != size {
				t.Fatalf("an inbox of %d bytes", d.Len)
			}
			p.send(tFill, 0, u64(size)...)
			if got := readFull(t, s, size); !bytes.Equal(got, make([]byte, size)) {
				t.Error("the memory was not cleared")
			}
			p.expect(tEmptied)
			p.send(tLeaveInbox, 0)
			pass(time.Second)
		}
	})
}

// An inbox that came after the only Write is given back.
func TestAnInboxThatIsNotUsedIsGivenBack(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, b, _, eb := pair(t, buffered, session.Config{})
		data := pattern(10_000)
		writeAll(t, a, data, len(data))
		readFull(t, b, len(data))
		pass(time.Second / 2)
		if eb.Left().Exposed != 1 {
			t.Fatal("there is no inbox")
		}
		pass(time.Minute)
		if left := eb.Left(); left.Exposed != 0 || left.Allocated != 0 {
			t.Errorf("kept: %+v", left)
		}
	})
}

// A long Read reports during its copying what it has emptied, so that the peer can fill it meanwhile.
func TestALongReadReportsWhatItHasEmptied(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		var e *ordered
		s, _, p := negotiatedOn(t, buffered, session.Config{ReceiveBudget: 64 << 10}, func(under *twin.Endpoint) session.Endpoint {
			e = &ordered{Endpoint: under}
			return e
		})
		d := p.ask()
		for at := 0; at < int(d.Len); at += 16 << 10 {
			p.fill(d, at, pattern(16<<10))
		}
		pass(time.Second)
		e.calls = ""
		if n, err := s.Read(make([]byte, d.Len)); n != int(d.Len) || err != nil {
			t.Fatal(n, err)
		}
		if want := "rcrcrcrc"; e.calls != want {
			t.Errorf("Releases and control messages came in the order %s, want %s", e.calls, want)
		}
	})
}

// While there is no room, a later Emptied replaces an earlier one, so that they do not accumulate.
func TestALaterEmptiedReplacesAnEarlierOne(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		cfg := buffered
		cfg.SendQueue = session.ControlReserve + 1
		s, _, p := negotiated(t, cfg, session.Config{ReceiveBudget: 10_000})
		p.ask()
		pass(2 * latency)
		p.Hold(twin.HoldMessages)
		for range cfg.SendQueue {
			if !p.send(tPing, 0) { // the replies fill the queue
				t.Fatal("no room for a question")
			}
		}
		pass(time.Second)
		const times = 12 // with more, the peer would have no credit
		for range times {
			if !p.send(tFill, 0, u64(5000)...) {
				t.Fatal("no room for a Fill")
			}
			pass(time.Millisecond)
			readFull(t, s, 5000)
		}
		p.Hold(0)
		pass(time.Second)
		for range cfg.SendQueue {
			p.expect(tPong)
		}
		if n := le.Uint64(p.expect(tEmptied)[8:]); n != 5000*times {
			t.Errorf("it says that it has read %d bytes", n)
		}
	})
}

// The inbox is left even after Close, because an end that goes on delivering is idle. The bytes in it
// are read nevertheless.
func TestAnInboxIsLeftBehindClose(t *testing.T) {
	data := pattern(20_000)
	t.Run("by this end", func(t *testing.T) {
		inBubble(t, func(t *testing.T) {
			s, _, p := negotiated(t, buffered, session.Config{KeepAlive: -1})
			in := p.open(s, 100_000)
			writeAll(t, s, data, len(data))
			go s.Close()
			pass(3 * time.Second)
			if got, _ := in.read(len(data)); !bytes.Equal(got, data) {
				t.Error("wrong bytes")
			}
			p.expect(tClose)
			p.expect(tLeaveInbox)
		})
	})
	t.Run("by the peer", func(t *testing.T) {
		inBubble(t, func(t *testing.T) {
			s, e, p := negotiated(t, buffered, session.Config{KeepAlive: -1})
			p.fill(p.ask(), 0, data)
			p.send(tClose, 0)
			p.expect(tCloseAck)
			p.send(tLeaveInbox, 0)
			pass(time.Second)
			if e.Left().Exposed != 1 {
				t.Fatal("revoked before it was read")
			}
			if got, err := io.ReadAll(readerOf(s)); err != nil || !bytes.Equal(got, data) {
				t.Errorf("%d bytes of %d, %v", len(got), len(data), err)
			}
			pass(time.Second)
			if left := e.Left(); left.Exposed != 0 || left.Allocated != 0 {
				t.Errorf("kept: %+v", left)
			}
		})
	})
}

// A peer that has closed does not write to its inbox any more. The inbox is released, even if the
// session is not closed.
func TestTheInboxOfAPeerThatHasClosedIsGivenBack(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, b, _, eb := pair(t, buffered, session.Config{})
		data := pattern(10_000)
		for range 2 {
			writeAll(t, a, data, len(data))
			pass(300 * time.Millisecond)
		}
		go a.Close()
		pass(time.Millisecond)
		if left := eb.Left(); left.Exposed != 1 {
			t.Errorf("before all of it was read: %+v", left)
		}
		readFull(t, b, 2*len(data))
		_, err := b.Read(make([]byte, 1))
		wantErr(t, "Read", err, io.EOF)
		<-a.Closed()
		pass(time.Second)
		if left := eb.Left(); left.Exposed != 0 || left.Allocated != 0 {
			t.Errorf("behind the end of the peer: %+v", left)
		}
	})
}

// LeaveInbox may come after Close, because the peer lingers.
func TestLeaveInboxMayComeBehindClose(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, buffered, session.Config{})
		p.ask()
		pass(2 * latency)
		p.send(tClose, 0)
		p.send(tLeaveInbox, 0)
		pass(2 * latency)
		_, err := s.Read(make([]byte, 1))
		wantErr(t, "Read", err, io.EOF)
		go s.Close()
		p.expect(tCloseAck)
		p.expect(tClose)
	})
}

// A peer that has closed gets no inbox, if its AskInbox comes after the Close.
func TestNoInboxBehindClose(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, ep, p := negotiated(t, buffered, session.Config{})
		p.send(tClose, 0)
		p.expect(tCloseAck)
		p.send(tAskInbox, 0)
		if b := p.expect(tInbox); le.Uint64(b[8+16:]) != 0 {
			t.Errorf("an inbox of %d bytes", le.Uint64(b[8+16:]))
		}
		if left := ep.Left(); left.Exposed != 0 || left.Allocated != 0 {
			t.Errorf("it keeps %+v", left)
		}
		go s.Close()
		p.expect(tClose)
	})
}

// If an inbox is requested while the one before it still has bytes, it opens after these were read.
func TestTheNextInboxOpensBehindTheLast(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, ep, p := negotiated(t, buffered, session.Config{ReceiveBudget: 50_000})
		d := p.ask()
		data := pattern(1000)
		p.fill(d, 0, data)
		p.send(tLeaveInbox, 0)
		p.send(tAskInbox, 0)
		if m := p.recv(); m != nil {
			t.Fatalf("a message of type %d before all was read", m[0])
		}
		if got := readFull(t, s, len(data)); !bytes.Equal(got, data) {
			t.Error("wrong bytes")
		}
		if b := p.expect(tInbox); le.Uint64(b[8+16:]) != 50_000 {
			t.Errorf("an inbox of %d bytes, want all of the budget", le.Uint64(b[8+16:]))
		}
		p.send(tLeaveInbox, 0)
		pass(time.Second)
		if left := ep.Left(); left.Exposed != 0 || left.Allocated != 0 {
			t.Errorf("kept: %+v", left)
		}
	})
}
