package session_test

import (
	"bytes"
	"testing"
	"time"

	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/session"
)

// A Write that is interrupted returns exactly how many bytes the peer has, and does not touch its slice
// any more. The next Write continues there.
func TestAnInterruptedWriteCounts(t *testing.T) {
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

// An interrupted Write stops soon: it waits for what is in progress, and begins nothing more.
func TestAnInterruptedWriteStopsSoon(t *testing.T) {
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

// A Read that is interrupted in the middle of a transfer returns what it has, possibly nothing. No byte
// is lost, and none comes later.
func TestAnInterruptedReadLosesNothing(t *testing.T) {
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
			// An expired deadline makes the Read fail even if data is ready.
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

// An interrupted Read stops soon: it waits for what is in progress, and begins nothing more.
func TestAnInterruptedReadStopsSoon(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		const size = 8 << 20
		cfg := byRead
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
}

// WriteBuffers in an interrupted direction sends nothing, not even small slices.
func TestAnInterruptedWriteBuffersSendsNothing(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, b, _, _ := pair(t, messages, session.Config{})
		a.InterruptWrite(true)
		n, err := a.WriteBuffers([][]byte{[]byte("one"), []byte("two")})
		wantErr(t, "WriteBuffers", err, session.ErrInterrupted)
		pass(time.Second)
		if n != 0 || b.Stats().MessagesReceived != 1 { // Negotiate
			t.Errorf("%d bytes were taken", n)
		}
	})
}

// A Write that is interrupted after some of its bytes are in the send buffer returns how many bytes the
// peer will have.
func TestAnInterruptedWriteCountsTheSendBuffer(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, b, _, _ := pair(t, buffered, session.Config{ReceiveBudget: 50_000, SendBudget: 50_000, Threshold: -1})
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

// ReadDone may cross CancelRead: the peer already has everything when it is told to stop, and both ends
// agree on that.
func TestDoneMayCrossCancel(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, b, ea, _ := pair(t, byRead, session.Config{})
		data, into := pattern(50_000), make([]byte, 50_000)
		r := goRead(b, into)
		pass(time.Second)
		w := goWrite(a, data)
		pass(latency / 2)
		ea.Hold(twin.HoldMessages | twin.HoldWrites) // ReadDone is on its way, and is delayed there
		pass(time.Second)
		a.InterruptWrite(true) // CancelRead is sent
		pass(100 * time.Millisecond)
		ea.Hold(0)
		x, y := within(t, w), within(t, r)
		a.InterruptWrite(false)
		if (x.n == len(data)) != (x.err == nil) {
			t.Errorf("Write: %+v", x)
		}
		w = goWrite(a, data[x.n:]) // possibly no bytes
		copy(into[y.n:], readFull(t, b, len(data)-y.n))
		within(t, w)
		if !bytes.Equal(into, data) {
			t.Errorf("Write says %d bytes, which is not what the peer has", x.n)
		}
	})
}

// D12: if a peer does not stop a cancelled transfer in time, the connection is ended. When Write or Read
// has returned, its slice is not touched any more.
func TestCancelIsBounded(t *testing.T) {
	for name, hold := range map[string]twin.Hold{
		"a Write whose peer goes on reading": twin.HoldReads,
		"a Write whose peer does not listen": twin.HoldMessages,
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				a, b, _, eb := pair(t, byRead, session.Config{CancelTimeout: 3 * time.Second, KeepAlive: -1})
				data := pattern(200_000)
				into := make([]byte, len(data))
				r := goRead(b, into)
				pass(time.Second)
				eb.Hold(hold)
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
				eb.Hold(0)
				pass(time.Minute)
				if changed(into, usedRead) >= 0 {
					t.Error("the slice was touched after Read returned")
				}
			})
		})
	}
}

// A Read waits no longer than CancelTimeout for a transfer of its own that does not end.
func TestACancelledReadIsBounded(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, e, p := negotiated(t, byRead, session.Config{CancelTimeout: 3 * time.Second, KeepAlive: -1})
		data, into := pattern(200_000), make([]byte, 200_000)
		r := goRead(s, into)
		pass(time.Second)
		e.Hold(twin.HoldReads)
		d, err := p.Expose(data, session.RemoteRead)
		if err != nil {
			t.Fatal(err)
		}
		p.send(tOfferRead, 0, u64(1, d.Addr, d.Key, d.Len)...)
		pass(time.Second)
		began := time.Now()
		s.InterruptRead(true)
		x := within(t, r)
		fill(into, usedRead)
		if took := time.Since(began); x.err == nil || took < 2*time.Second || took > 4*time.Second {
			t.Errorf("Read: %+v, %v after it was interrupted", x, took)
		}
		e.Hold(0)
		pass(time.Minute)
		if changed(into, usedRead) >= 0 {
			t.Error("the slice was touched after Read returned")
		}
	})
}

// A Write that is stopped while the peer reads its bytes requests no inbox for the rest, as it does not
// write that.
func TestAStoppedWriteRequestsNoInbox(t *testing.T) {
	for name, stop := range map[string]func(*session.Session){
		"interrupted": func(s *session.Session) { s.InterruptWrite(true) },
		"CloseWrite":  func(s *session.Session) { s.CloseWrite() },
		"Close":       func(s *session.Session) { s.Close() },
		"taken":       func(s *session.Session) { s.TakeWrite() },
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				s, _, p := negotiated(t, buffered, session.Config{})
				w := goWrite(s, pattern(100_000))
				m := p.expect(tOfferRead)
				go stop(s)
				p.expect(tCancelRead)
				p.send(tReadDone, 0, u64(uint64(le.Uint32(m)), 0)...)
				within(t, w)
				for m := p.recv(); m != nil; m = p.recv() {
					if m[0] == tAskInbox {
						t.Error("it requests an inbox")
					}
				}
			})
		})
	}
}
