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

// A stream that was cut must not look complete. When the peer's process ends, the stream is complete
// only on a ring, which keeps all that the process wrote, and only if the process was not in a Write.
func TestDeathOfThePeer(t *testing.T) {
	for name, tt := range map[string]struct {
		cfg    twin.Config
		inside bool // the peer is in a Write
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

// On a ring all bytes of a process that has ended are kept, and its last message tells whether its last
// Write was complete. That is so whether a Read has taken the message or nobody has.
func TestTheLastMessageTellsWhetherAWriteWasWhole(t *testing.T) {
	const more = 1
	data := func(flags byte) func(*raw) {
		return func(p *raw) { p.send(tData, flags, pattern(100)...) }
	}
	for name, tt := range map[string]struct {
		say []func(*raw)
		end error
	}{
		"whole":                         {[]func(*raw){data(0)}, io.EOF},
		"cut":                           {[]func(*raw){data(0), data(more)}, syscall.ECONNRESET},
		"behind a part of it, the rest": {[]func(*raw){data(more), data(0)}, io.EOF},
	} {
		for who, reads := range map[string]bool{"a Read waits": true, "nobody reads": false} {
			t.Run(name+"/"+who, func(t *testing.T) {
				inBubble(t, func(t *testing.T) {
					s, _, p := negotiated(t, ring, session.Config{})
					end := make(chan error, 1)
					read := func() { _, err := io.ReadAll(readerOf(s)); end <- err }
					if reads {
						go read()
					}
					for _, say := range tt.say {
						pass(time.Second)
						say(p)
					}
					pass(time.Second)
					p.Kill()
					pass(time.Second)
					if !reads {
						go read()
					}
					if err := <-end; tt.end == io.EOF && err != nil {
						t.Errorf("the end: %v", err)
					} else if tt.end != io.EOF {
						wantErr(t, "the end", err, tt.end)
					}
				})
			})
		}
	}
}

// After ResetAtDeath(true), the end of a process without Close is a reset, at any place of the stream.
func TestResetAtDeath(t *testing.T) {
	write := func(t *testing.T, s *session.Session) {
		if _, err := s.Write(pattern(5000)); err != nil {
			t.Fatal(err)
		}
	}
	lend := func(t *testing.T, s *session.Session) {
		room, err := s.Reserve(100)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Commit(copy(room, pattern(100))); err != nil {
			t.Fatal(err)
		}
	}
	on := func(_ *testing.T, s *session.Session) { s.ResetAtDeath(true) }
	off := func(_ *testing.T, s *session.Session) { s.ResetAtDeath(false) }
	in := func(_ *testing.T, s *session.Session) { s.InWrite() }
	shut := func(t *testing.T, s *session.Session) {
		if err := s.CloseWrite(); err != nil {
			t.Fatal(err)
		}
	}
	type steps []func(*testing.T, *session.Session)
	for name, tt := range map[string]struct {
		steps steps
		want  error
	}{
		"nothing written":       {steps{on}, syscall.ECONNRESET},
		"written before":        {steps{write, on}, syscall.ECONNRESET},
		"written":               {steps{on, write}, syscall.ECONNRESET},
		"lent":                  {steps{on, lend}, syscall.ECONNRESET},
		"off and nothing after": {steps{on, write, off}, syscall.ECONNRESET}, // the stream was cut at that place
		"off and written":       {steps{on, write, off, write}, io.EOF},
		"within a Write":        {steps{in}, syscall.ECONNRESET},
		"behind that Write":     {steps{in, write}, io.EOF},
		"within one that is on": {steps{on, in, off}, syscall.ECONNRESET},
		"closed":                {steps{on, write, shut}, io.EOF},
		"closed without a byte": {steps{on, shut}, io.EOF},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				a, b, ea, _ := pair(t, ring, session.Config{})
				for _, step := range tt.steps {
					step(t, a)
				}
				pass(time.Second)
				ea.Kill()
				_, err := io.ReadAll(readerOf(b))
				if tt.want == io.EOF && err != nil || tt.want != io.EOF && !errors.Is(err, tt.want) {
					t.Errorf("the end: %v, want %v", err, tt.want)
				}
			})
		})
	}
}

// If the peer cannot be told at once, it is told after Negotiate, or once there is room.
func TestResetAtDeathIsToldLater(t *testing.T) {
	for name, told := range map[string]func(*testing.T, *session.Session, *session.Session){
		"negotiated": func(t *testing.T, a, b *session.Session) {
			a.ResetAtDeath(true)
			negotiate(t, a)
			negotiate(t, b)
		},
		"room": func(t *testing.T, a, b *session.Session) {
			negotiate(t, a)
			negotiate(t, b)
			all := 0
			for n := 1; n > 0; all += n { // until a Write finds no room; each is written whole or not at all
				wrote := goWrite(a, pattern(1))
				pass(time.Millisecond)
				a.InterruptWrite(true)
				n = within(t, wrote).n
				a.InterruptWrite(false)
			}
			a.ResetAtDeath(true)
			readFull(t, b, all)
		},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				ea, eb := twins(t, ring)
				cfg := withoutKeepAlive(session.Config{})
				a, b := session.New(ea, cfg), session.New(eb, cfg)
				defer func() {
					a.Abort()
					b.Abort()
					idle()
				}()
				told(t, a, b)
				pass(time.Second)
				ea.Kill()
				_, err := io.ReadAll(readerOf(b))
				wantErr(t, "the end", err, syscall.ECONNRESET)
			})
		})
	}
}

// A WriteBuffers of which some slices went in one message is not complete yet.
func TestSlicesThatWerePackedAreNotTheWhole(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		cfg := ring
		cfg.QueueBytes = 6 << 10 // has room for the first three
		a, b, ea, _ := pair(t, cfg, session.Config{})
		v := [][]byte{pattern(1000), pattern(1000), pattern(1000), pattern(100_000)}
		go a.WriteBuffers(v)
		pass(time.Second)
		ea.Kill()
		got, err := io.ReadAll(readerOf(b))
		wantErr(t, "the end", err, syscall.ECONNRESET)
		if !bytes.Equal(got, bytes.Join(v[:3], nil)) {
			t.Errorf("%d bytes of 3000, or wrong ones", len(got))
		}
	})
}

// Empty slices at the end of a WriteBuffers add nothing: a process that ends after it has ended in
// order.
func TestEmptySlicesEndAWriteBuffers(t *testing.T) {
	for name, tt := range map[string]struct {
		cfg twin.Config
		v   [][]byte
	}{
		"a message":      {ring, [][]byte{pattern(5000), nil}},
		"packed":         {ring, [][]byte{pattern(100), nil, {}}},
		"behind small":   {ring, [][]byte{pattern(100), nil, pattern(5000), nil, {}}},
		"nothing before": {ring, [][]byte{nil, {}}},
		"packed alone":   {ring, [][]byte{pattern(100), pattern(100)}},
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

// A stream whose last message is an open offer was cut.
func TestAnOpenOfferIsNotTheWhole(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, b, ea, _ := pair(t, byRead, session.Config{ReceiveBudget: 1})
		goWrite(a, pattern(1<<20))
		pass(time.Second)
		ea.Kill()
		pass(time.Second)
		_, err := io.ReadAll(readerOf(b))
		wantErr(t, "the end", err, syscall.ECONNRESET)
	})
}

// An offer that ended short is an incomplete Write: a stream that ends there was cut.
func TestAShortOfferIsNotTheWhole(t *testing.T) {
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

// A Write that is offered in pieces is cut if the peer's process ends between two of them.
func TestAnOfferOfAPartIsNotTheWhole(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		cfg := byRead
		cfg.Limits.MaxExpose = 50_000
		a, b, ea, _ := pair(t, cfg, session.Config{ReceiveBudget: 1})
		goWrite(a, pattern(100_000))
		readFull(t, b, 51_024) // one offer, with the bytes in its message
		ea.Kill()
		got, err := io.ReadAll(readerOf(b))
		wantErr(t, "Read", err, syscall.ECONNRESET)
		if len(got) >= 49_000 {
			t.Errorf("%d bytes more were read", len(got))
		}
	})
}

// Each offer of a Write, except the last one, has the flag that the Write continues.
func TestOffersTellThatTheirWriteGoesOn(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		cfg := byRead
		cfg.Limits.MaxExpose = 50_000
		s, _, p := negotiated(t, cfg, session.Config{KeepAlive: -1})
		w := goWrite(s, pattern(100_000)) // two offers, each with 1 KiB in its message
		for id := uint64(1); id <= 2; id++ {
			m := p.recv()
			if len(m) < header || m[0] != tOfferRead {
				t.Fatalf("%x instead of an offer", m[:min(len(m), header)])
			}
			const more = 1
			if goesOn := m[1]&more != 0; goesOn != (id == 1) {
				t.Errorf("offer %d: the Write goes on: %v", id, goesOn)
			}
			p.send(tReadDone, 0, u64(id, descriptor(m[header+8:]).Len)...)
		}
		if x := within(t, w); x.n != 100_000 || x.err != nil {
			t.Errorf("Write: %+v", x)
		}
	})
}

// A peer whose endpoint was closed in order, but whose session was not closed, has cut its stream.
func TestAnEndpointClosedWithoutCloseIsACut(t *testing.T) {
	for name, cfg := range map[string]twin.Config{"messages": messages, "ring": ring} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				s, _, p := negotiated(t, cfg, session.Config{})
				p.send(tData, 0, []byte("last")...)
				p.Close()
				got, err := io.ReadAll(readerOf(s))
				wantErr(t, "the end", err, syscall.ECONNRESET)
				if string(got) != "last" {
					t.Errorf("%q", got)
				}
			})
		})
	}
}

// The first Write after the end of the connection fails already: no bytes are accepted that nobody will
// get.
func TestAWriteBehindTheEndFails(t *testing.T) {
	for name, tt := range map[string]struct {
		cfg     twin.Config
		buffers bool // the session has a send buffer and an inbox
		size    int
	}{
		"small": {messages, false, 100}, "large": {messages, false, 20_000}, "before an offer": {byRead, false, 10_000},
		"small, buffers": {buffered, true, 100}, "buffers": {buffered, true, 20_000}, "no buffers yet": {buffered, false, 20_000},
	} {
		for _, slices := range []int{0, 1, 3} {
			t.Run(fmt.Sprint(name, "/", slices), func(t *testing.T) {
				inBubble(t, func(t *testing.T) {
					s, _, p := negotiated(t, tt.cfg, session.Config{KeepAlive: -1})
					if tt.buffers {
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

// When the peer reads no more, a Write that waits fails at once, and so does the next one.
func TestAWriteEndsWithThePeersReading(t *testing.T) {
	for name, tt := range map[string]struct {
		end  byte
		want error
	}{"Close": {tClose, syscall.EPIPE}, "Abort": {tAbort, syscall.ECONNRESET}} {
		end, want := tt.end, tt.want
		for form, tt := range map[string]struct {
			cfg   twin.Config
			offer bool
		}{
			"messages": {messages, false}, "ring": {ring, false}, "by read": {byRead, true},
		} {
			t.Run(name+"/"+form, func(t *testing.T) {
				inBubble(t, func(t *testing.T) {
					s, _, p := negotiated(t, tt.cfg, session.Config{})
					w := goWrite(s, pattern(1<<20))
					if tt.offer {
						p.expect(tOfferRead)
					}
					pass(time.Second)
					began := time.Now()
					p.send(end, 0)
					if tt.offer {
						p.send(tReadDone, 2, u64(1, 0)...) // the peer ends the offer, by the flag gone
					}
					x := within(t, w)
					wantErr(t, "the Write that waits", x.err, want)
					if took := time.Since(began); took > time.Millisecond {
						t.Errorf("it waits for %v more", took)
					}
					_, err := s.Write([]byte("x"))
					wantErr(t, "the next", err, syscall.EPIPE)
				})
			})
		}
	}
}

// CloseWrite fails if the peer has reset the connection or has died, but not if it has closed.
func TestCloseWriteReportsAReset(t *testing.T) {
	for name, tt := range map[string]struct {
		end  func(p *raw)
		want error
	}{
		"closed":  {func(p *raw) { p.send(tClose, 0); p.recv(); p.Close() }, nil},
		"reset":   {func(p *raw) { p.send(tAbort, 0) }, syscall.ECONNRESET},
		"aborted": {func(p *raw) { p.Abort() }, syscall.ECONNRESET},
	} {
		t.Run(name, func(t *testing.T) {
			for form, cfg := range map[string]twin.Config{"messages": messages, "ring": ring} {
				inBubble(t, func(t *testing.T) {
					s, _, p := negotiated(t, cfg, session.Config{})
					tt.end(p)
					pass(time.Second)
					if err := s.CloseWrite(); !errors.Is(err, tt.want) {
						t.Errorf("%s: %v instead of %v", form, err, tt.want)
					}
				})
			}
		})
	}
}

// If an offer is cancelled before any of it is in a Read's slice, the Read returns what the same poll
// has found after the offer, even if the peer has closed by then.
func TestTheLastWriteBehindACancelledOfferIsRead(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		e := &betweenLooks{}
		s, _, p := negotiatedOn(t, byRead, session.Config{}, func(under *twin.Endpoint) session.Endpoint {
			e.Endpoint = under
			return e
		})
		const last = "the last Write"
		answered := false
		e.then = func() {
			if n := le.Uint64(p.expectDone(t, 1, 0)); n != 0 {
				t.Errorf("the slice has got %d bytes", n)
			}
			p.send(tData, 0, []byte(last)...)
			p.send(tClose, 0)
			p.Close()
			nap(2 * latency)
			answered = true
		}
		d, err := p.Expose(make([]byte, 1<<20), session.RemoteRead)
		if err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, 1<<20)
		r := goRead(s, buf)
		pass(2 * latency)
		p.send(tOfferRead, 0, u64(1, d.Addr, d.Key, d.Len)...)
		pass(2 * latency)
		p.send(tCancelRead, 0, u64(1)...)
		if r := within(t, r); string(buf[:r.n]) != last || r.err != nil {
			t.Errorf("%q, %v", buf[:min(r.n, 100)], r.err)
		}
		if n, err := s.Read(buf); n != 0 || err != io.EOF {
			t.Errorf("behind it %d bytes, %v", n, err)
		}
		if !answered {
			t.Error("no offer was withdrawn")
		}
	})
}

// If RDMA reads have brought all bytes into a Read's slice, the Read returns them, even if the peer's
// process ends before the Read's next look.
func TestTheLastCompletionBeforeADeathCounts(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		e := &secondErr{}
		s, under, p := negotiatedOn(t, byRead, session.Config{KeepAlive: -1, Spin: -1}, func(under *twin.Endpoint) session.Endpoint {
			e.Endpoint = under
			return e
		})
		const size = 100_000
		data, into := pattern(size), make([]byte, size)
		r := goRead(s, into)
		pass(time.Second)
		under.Hold(twin.HoldReads)
		d, err := p.Expose(data, session.RemoteRead)
		if err != nil {
			t.Fatal(err)
		}
		p.send(tOfferRead, 0, u64(1, d.Addr, d.Key, d.Len)...)
		pass(time.Second)
		acted := false
		act := func() {
			acted = true
			under.Hold(0)
			nap(2 * latency)
			p.Kill()
			nap(2 * latency)
		}
		e.act.Store(&act)
		p.send(tPing, 0) // makes the Read look again
		if r := within(t, r); r.n != size || r.err != nil || !bytes.Equal(into, data) {
			t.Errorf("Read: %+v", r)
		}
		n, err := s.Read(into)
		if n != 0 {
			t.Errorf("%d bytes behind it", n)
		}
		wantErr(t, "behind it", err, syscall.ECONNRESET)
		if !acted {
			t.Error("nobody asked the endpoint twice")
		}
	})
}

// The same if another goroutine's poll has handled the end of the transfers, and what came after them,
// before the Read finds that the connection has ended.
func TestTheLastCompletionInAnotherPollCounts(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		e := &lateArm{}
		s, under, p := negotiatedOn(t, byRead, session.Config{KeepAlive: -1, Spin: -1}, func(under *twin.Endpoint) session.Endpoint {
			e.Endpoint = under
			return e
		})
		const size, last = 100_000, "the last Write"
		data, into := pattern(size), make([]byte, size)
		r := goRead(s, into)
		pass(time.Second)
		under.Hold(twin.HoldReads)
		d, err := p.Expose(data, session.RemoteRead)
		if err != nil {
			t.Fatal(err)
		}
		p.send(tOfferRead, 0, u64(1, d.Addr, d.Key, d.Len)...)
		pass(time.Second)
		between, goOn := make(chan struct{}), make(chan struct{})
		e.before(func() { close(between); <-goOn })
		p.send(tPing, 0) // makes the Read look again
		<-between
		under.Hold(0)
		pass(2 * latency)
		s.ReadUrgent(nil) // polls
		p.expectDone(t, 1, 0)
		p.send(tData, 0, []byte(last)...)
		pass(2 * latency)
		p.Kill()
		pass(2 * latency)
		s.ReadUrgent(nil) // polls
		if s.BrokenDirect() {
			t.Error("a Read with all its bytes is cut short")
		}
		close(goOn)
		if r := within(t, r); r.n != size || r.err != nil || !bytes.Equal(into, data) {
			t.Errorf("Read: %+v", r)
		}
		n, err := s.Read(into)
		if string(into[:n]) != last || err != nil {
			t.Errorf("behind it: %q, %v", into[:n], err)
		}
		_, err = s.Read(into)
		wantErr(t, "the end", err, syscall.ECONNRESET)
	})
}

// A Read returns only when nothing writes to its slice any more: if the connection has ended before a
// transfer has, the endpoint is aborted first.
func TestTheSliceIsGivenBackBehindTheTransfers(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		e := &lateFlush{}
		s, under, p := negotiatedOn(t, byRead, session.Config{KeepAlive: -1}, func(under *twin.Endpoint) session.Endpoint {
			e.Endpoint = under
			return e
		})
		const size = 100_000
		r := goRead(s, make([]byte, size))
		pass(time.Second)
		under.Hold(twin.HoldReads)
		d, err := p.Expose(pattern(size), session.RemoteRead)
		if err != nil {
			t.Fatal(err)
		}
		p.send(tOfferRead, 0, u64(1, d.Addr, d.Key, d.Len)...)
		pass(time.Second)
		e.failed.Store(true)
		p.send(tPing, 0) // makes the Read look again
		within(t, r)
		if left := under.Left(); !under.Closed() || left.Posted == 0 {
			t.Errorf("behind the Read: closed %v, %d transfers under way then", under.Closed(), left.Posted)
		}
	})
}

// What the peer had written before its process ended is read, even if an RDMA write to its inbox has
// failed. Either of the two may be polled first, which depends on the seed.
func TestAReplyIsReadThoughAnRDMAWriteFailed(t *testing.T) {
	for seed := range uint64(6) {
		inBubble(t, func(t *testing.T) {
			cfg := buffered
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
			nap(3 * latency) // both have arrived, and nobody has polled
			wantReply(t, s, syscall.ECONNRESET)
		})
	}
}

const reply = "the reply"

// wantReply reads the reply, and then expects end.
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

// ResetAtDeath sends one message, which is not a byte that the peer would have to read before it closes.
func TestResetAtDeathIsNoByte(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, b, _, _ := pair(t, ring, session.Config{})
		before := a.Stats().MessagesSent
		a.ResetAtDeath(true)
		writeAll(t, a, pattern(100), 100)
		if n := a.Stats().MessagesSent - before; n != 2 {
			t.Errorf("%d messages", n)
		}
		readFull(t, b, 100)
		b.ResetAtDeath(true)
		pass(time.Second)
		a.Close()
		_, err := b.Read(make([]byte, 1))
		wantErr(t, "Read", err, io.EOF)
	})
}
