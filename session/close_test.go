package session_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/session"
)

// E1: each direction ends by itself.
func TestEachDirectionEndsOnItsOwn(t *testing.T) {
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
		for range 3 { // the other direction still works
			w := goWrite(b, pattern(100_000))
			readFull(t, a, 100_000)
			if r := within(t, w); r.err != nil {
				t.Fatal(r.err)
			}
			pass(time.Hour)
		}
	})
}

// E2: Close ends calls that wait.
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

// What was written before Close arrives, followed by io.EOF, even if Close has returned before the peer
// has read any of it.
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
		if n, err := b.Write([]byte("x")); n != 1 || err != nil {
			t.Errorf("the first Write to a closed peer: %d, %v", n, err)
		}
		_, err = b.Write([]byte("x"))
		wantErr(t, "the second", err, syscall.EPIPE)
	})
}

// As with TCP, Close with unread data is a reset, which the peer finds after what was written.
func TestCloseWithUnreadDataIsAReset(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		a, b, _, _ := pair(t, cfg, session.Config{})
		if _, err := b.Write(pattern(1000)); err != nil {
			t.Fatal(err)
		}
		if _, err := a.Write(pattern(2000)); err != nil {
			t.Fatal(err)
		}
		pass(2 * latency) // it has arrived, and nobody has read it
		a.Close()
		got, err := io.ReadAll(readerOf(b))
		wantErr(t, "reading to the end", err, syscall.ECONNRESET)
		if !bytes.Equal(got, pattern(2000)) {
			t.Errorf("%d bytes before the reset, want 2000", len(got))
		}
	})
}

// Close after CloseWrite still tells the peer that this end reads no more.
func TestCloseFollowsCloseWrite(t *testing.T) {
	for name, cfg := range map[string]twin.Config{"messages": messages, "ring": ring} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				s, _, p := negotiated(t, cfg, session.Config{})
				if err := s.CloseWrite(); err != nil {
					t.Fatal(err)
				}
				p.expect(tShutdown)
				go s.Close()
				p.expect(tClose)
			})
		})
	}
}

// A session that is closed ends as soon as its peer has ended, without waiting for CloseTimeout.
func TestCloseEndsWithThePeer(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, e, p := negotiated(t, messages, session.Config{CloseTimeout: time.Hour})
		s.Close() // the peer does not answer
		if e.Closed() {
			t.Fatal("it did not wait")
		}
		p.Kill()
		select {
		case <-s.Closed():
		case <-time.After(time.Second):
			t.Error("it waits for a peer that has died")
		}
	})
}

// Closed is signalled only when the session's background goroutines have ended.
func TestClosedWaitsForWorkers(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		began := make(chan struct{}, 10)
		s, _, p := negotiatedOn(t, buffered, session.Config{}, withMemory(func(m session.Memory) session.Memory {
			return slowRevoke{m, began}
		}))
		p.ask()
		p.send(tLeaveInbox, 0)
		<-began
		at := time.Now()
		s.Abort()
		<-s.Closed()
		if took := time.Since(at); took < time.Second {
			t.Errorf("closed after %v, while its inbox is revoked", took)
		}
	})
}

// A session that has retired its endpoint does not call it any more, whichever method is called.
func TestAClosedSessionLeavesItsEndpointAlone(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		for name, end := range map[string]func(*session.Session){
			"Close": func(s *session.Session) { s.Close() },
			"Abort": (*session.Session).Abort,
		} {
			a, b, _, _ := pair(t, cfg, session.Config{})
			writeAll(t, a, []byte("x"), 1)
			readFull(t, b, 1)
			end(a)
			b.Close()
			<-a.Closed()
			p := make([]byte, 10)
			for what, call := range map[string]func() error{
				"Read":         func() error { _, err := a.Read(p); return err },
				"Write":        func() error { _, err := a.Write(p); return err },
				"WriteBuffers": func() error { _, err := a.WriteBuffers([][]byte{p, p}); return err },
				"WriteUrgent":  func() error { _, err := a.WriteUrgent(p); return err },
				"Reserve":      func() error { _, err := a.Reserve(1); return err },
				"Peek":         func() error { _, err := a.Peek(); return err },
				"CloseWrite":   a.CloseWrite,
				"Close":        a.Close,
			} {
				wantErr(t, what+" behind "+name, call(), session.ErrClosed)
			}
			_, err := a.ReadUrgent(p)
			wantErr(t, "ReadUrgent", err, session.ErrNoUrgent)
			wantErr(t, "Commit", a.Commit(0), session.ErrNotReserved)
			wantErr(t, "Discard", a.Discard(1), session.ErrNotReserved)
			a.KeepAlivePeriod(time.Second)
			a.KeepAliveOn(true)
			a.InterruptRead(true)
			a.InterruptWrite(true)
			a.Abort()
			pass(time.Minute)
		}
	})
}

// While Close goes on delivering to a silent peer, no other call waits for that.
func TestNoCallWaitsWhileCloseDelivers(t *testing.T) {
	for name, cfg := range map[string]twin.Config{"messages": messages, "by read": byRead, "buffered": buffered} {
		for _, after := range []time.Duration{time.Millisecond, time.Minute} { // while Close itself waits, and after it has returned
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

// Close waits for a peer that reads slowly: the process may end afterwards, and bytes that it still has
// would be lost.
func TestCloseWaitsForASlowReader(t *testing.T) {
	for _, tt := range []struct {
		name       string
		endpoint   twin.Config
		session    session.Config
		size, part int
	}{
		{"read by RDMA", buffered, session.Config{}, 500_000, 2000},
		{"messages", messages, session.Config{}, 500_000, 2000},
		// Both buffers are full; reading a quarter of the inbox takes longer than closeWait.
		{"inbox", buffered, session.Config{Threshold: -1, SendBudget: 4 << 20, ReceiveBudget: 4 << 20}, 8 << 20, 10_000},
	} {
		t.Run(tt.name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				tt.session.CloseTimeout = time.Hour
				a, b, ea, _ := pair(t, tt.endpoint, tt.session)
				data := pattern(tt.size)
				over := make(chan []byte)
				go func() {
					var all []byte
					for part := make([]byte, tt.part); ; {
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
				st := b.Stats()
				if buffered := st.OffersReceived == 0 && st.OfferedBytesReceived > 0; buffered != (tt.name == "inbox") {
					t.Errorf("through the inbox: %v; %+v", buffered, st)
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

// A peer that writes but does not read does not delay Close.
func TestCloseDoesNotWaitForAPeerThatOnlyWrites(t *testing.T) {
	for name, cfg := range map[string]twin.Config{"buffered": buffered, "messages": messages} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				a, b, _, _ := pair(t, cfg, session.Config{Threshold: -1, KeepAlive: -1, CloseTimeout: 20 * time.Second})
				w := goWrite(a, pattern(16<<20))
				over := make(chan struct{})
				go func() {
					defer close(over)
					for part := make([]byte, 10_000); ; nap(10 * time.Millisecond) {
						if _, err := b.Write(part); err != nil {
							return
						}
					}
				}()
				pass(time.Second)
				began := time.Now()
				a.Close()
				if took := time.Since(began); took > 3*time.Second {
					t.Errorf("Close took %v", took)
				}
				within(t, w)
				b.Close()
				<-over
			})
		})
	}
}

// A peer that does not read does not delay Close for long, and the endpoint is released after
// CloseTimeout.
func TestCloseDoesNotWaitForAPeerThatDoesNotRead(t *testing.T) {
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

// A Write that waits fails when the peer closes, whichever way its bytes go: they are never discarded
// unnoticed.
func TestAWriteFailsWhenThePeerCloses(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		a, b, _, _ := pair(t, cfg, session.Config{ReceiveBudget: 1})
		const size = 4 << 20
		w := goWrite(a, pattern(size))
		readFull(t, b, 100_000)
		b.Close()
		x := within(t, w)
		wantErr(t, "Write", x.err, syscall.ECONNRESET) // what the peer wrote is unread
		_, err := a.Write(pattern(10))
		wantErr(t, "the next", err, syscall.EPIPE)
		if x.n < 100_000 || x.n >= size {
			t.Errorf("Write took %d bytes of %d, 100,000 were read", x.n, size)
		}
	})
}

// Abort ends the calls that wait at the peer with ECONNRESET.
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

// Abort ends a delivery that Close has begun.
func TestAbortEndsTheDelivery(t *testing.T) {
	for name, cfg := range map[string]twin.Config{"messages": messages, "buffered": buffered, "ring": ring} {
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

// If the connection is aborted after Write or CloseWrite has looked at the session's state and before it
// looks at the endpoint's, the call fails with ErrClosed, not with the endpoint's error.
func TestAbortInTheMiddleOfACall(t *testing.T) {
	for name, f := range map[string]func(*session.Session) error{
		"Write":      func(s *session.Session) error { _, err := s.Write(make([]byte, 1<<20)); return err },
		"CloseWrite": (*session.Session).CloseWrite,
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				ea, eb := twins(t, ring)
				e := &abortsInErr{Endpoint: ea}
				a, b := session.New(e, session.Config{}), session.New(eb, session.Config{})
				defer idle()
				defer b.Abort()
				defer a.Abort()
				negotiate(t, a)
				negotiate(t, b)
				aborted := false
				abort := func() { aborted = true; a.Abort() }
				e.abort.Store(&abort)
				if err := f(a); !errors.Is(err, session.ErrClosed) {
					t.Errorf("it ends with %v", err)
				}
				a.Abort()
				if <-a.Closed(); !aborted {
					t.Error("nobody asked the endpoint")
				}
			})
		})
	}
}

// Over does not use the endpoint after it was retired.
func TestOverAfterClose(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		a, _, ea, _ := pair(t, cfg, session.Config{})
		if err := a.Over(); err != nil {
			t.Errorf("over while it lives: %v", err)
		}
		a.Close()
		if <-a.Closed(); !ea.Retired() {
			t.Error("not retired")
		}
		wantErr(t, "Over", a.Over(), session.ErrClosed)
	})
}

// Close and Abort are acknowledged at once, as their sender keeps its endpoint until then, or until
// CloseTimeout. On a ring there is no acknowledgement.
func TestTheEndIsAcknowledged(t *testing.T) {
	for name, end := range map[string]byte{"Close": tClose, "Abort": tAbort} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				_, _, p := negotiated(t, messages, session.Config{})
				p.send(end, 0)
				p.expect(tCloseAck)
				_, _, p = negotiated(t, ring, session.Config{})
				p.send(end, 0)
				if m := p.recv(); m != nil {
					t.Errorf("a message of type %d, of a ring", m[0])
				}
			})
		})
	}
}

// Delivered is true if the peer has acknowledged the end, or has read the whole stream.
func TestDelivered(t *testing.T) {
	for name, tt := range map[string]struct {
		answer []byte // the peer's reply to Close
		want   bool
	}{
		"confirmed":        {[]byte{tCloseAck}, true},
		"closed, too":      {[]byte{tClose}, true},
		"reset":            {[]byte{tAbort}, false},
		"end of its bytes": {[]byte{tShutdown}, false},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				s, _, p := negotiated(t, messages, session.Config{})
				writeAll(t, s, pattern(100), 100)
				go s.Close()
				p.expect(tData)
				p.expect(tClose)
				for _, typ := range tt.answer {
					p.send(typ, 0)
				}
				pass(time.Second)
				p.Kill()
				<-s.Closed()
				if got := s.Delivered(); got != tt.want {
					t.Errorf("Delivered is %v", got)
				}
			})
		})
	}
}

// A second CloseWrite sends nothing.
func TestCloseWriteTwice(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		a, b, _, _ := pair(t, cfg, session.Config{})
		for range 2 {
			if err := a.CloseWrite(); err != nil {
				t.Fatal(err)
			}
		}
		_, err := b.Read(make([]byte, 1))
		wantErr(t, "Read", err, io.EOF)
		pass(time.Second)
		writeAll(t, b, pattern(100), 100)
		if got := readFull(t, a, 100); !bytes.Equal(got, pattern(100)) {
			t.Error("wrong bytes")
		}
	})
}
