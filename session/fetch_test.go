package session_test

import (
	"bytes"
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/session"
)

// A Read that waits with a large slice gets an offer's bytes without a copy: they do not pass through
// memory of the session.
func TestALargeReadIsDirect(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		cfg := byRead
		cfg.AllocBudget = 1 // there is no memory for a chunk
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
}

// Wherever in a large slice an offer's bytes begin, transfers end at the same addresses of the slice, so
// that the next Read finds the memory that was registered for this one.
func TestReadsOfOneSliceAreCutAtTheSameBlocks(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		cfg := byRead
		cfg.Limits.MaxRDMA = 10_000
		m := new(notedReads)
		s, _, p := negotiatedOn(t, cfg, session.Config{}, withMemory(func(under session.Memory) session.Memory {
			m.Memory = under
			return m
		}))
		data, into := pattern(100_000), make([]byte, 110_000)
		d, err := p.Expose(data, session.RemoteRead)
		if err != nil {
			t.Fatal(err)
		}
		for id, before := range []int{0, 1, 2_000, 4_000} {
			m.ends = nil
			r := make(chan result, 1)
			go func() {
				n, err := io.ReadFull(s, into[:before+len(data)])
				r <- result{n, err}
			}()
			pass(time.Second)
			if before > 0 {
				p.send(tData, 0, make([]byte, before)...)
			}
			p.send(tOfferRead, 0, u64(uint64(id+1), d.Addr, d.Key, d.Len)...)
			if x := within(t, r); x.err != nil || !bytes.Equal(into[before:before+len(data)], data) {
				t.Fatalf("Read: %+v", x)
			}
			for i, end := range m.ends {
				if last := i == len(m.ends)-1; !last && end%uintptr(cfg.Limits.MaxRDMA) != 0 {
					t.Errorf("behind %d bytes, transfer %d of %d ends at %d of the slice", before, i, len(m.ends), end-address(into))
				}
			}
			if len(m.ends) < len(data)/cfg.Limits.MaxRDMA {
				t.Errorf("behind %d bytes, %d transfers into the slice", before, len(m.ends))
			}
		}
	})
}

// What does not fit into the slice of a Read is fetched ahead, even if no other Read follows, so that
// the peer's Write ends.
func TestTheRestBehindADirectReadIsFetchedAhead(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, b, _, _ := pair(t, byRead, session.Config{})
		data, into := pattern(1<<20), make([]byte, 300_000)
		r := goRead(b, into)
		pass(time.Second)
		w := goWrite(a, data)
		x := within(t, r)
		if x.err != nil {
			t.Fatal(x.err)
		}
		if y := within(t, w); y.n != len(data) || y.err != nil {
			t.Errorf("Write: %+v", y)
		}
		if got := append(into[:x.n:x.n], readFull(t, b, len(data)-x.n)...); !bytes.Equal(got, data) {
			t.Error("wrong bytes")
		}
	})
}

// What is offered while a Read waits goes into its slice, whoever polls the offer: the idle poller,
// another call, or the Read itself.
func TestAnOfferIsLeftToTheReadThatWaits(t *testing.T) {
	for name, find := range map[string]struct {
		waited time.Duration
		look   func(*session.Session)
	}{
		"the idle poller": {time.Millisecond, func(*session.Session) {}},
		"another call":    {time.Second, func(s *session.Session) { s.ReadUrgent(nil) }},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				s, _, p := negotiatedOn(t, byRead, session.Config{}, func(under *twin.Endpoint) session.Endpoint {
					return &lateWake{Endpoint: under}
				})
				pass(time.Second) // the idle poller has stopped looking
				data, into := pattern(offered), make([]byte, len("inline")+offered)
				d, err := p.Expose(data, session.RemoteRead)
				if err != nil {
					t.Fatal(err)
				}
				r := goRead(s, into)
				pass(find.waited)
				p.send(tOfferRead, 0, append(u64(1, d.Addr, d.Key, d.Len), "inline"...)...)
				pass(2 * latency)
				find.look(s)
				began := time.Now()
				if x := within(t, r); x.n != len(into) || x.err != nil || string(into) != "inline"+string(data) {
					t.Errorf("Read: %+v", x)
				}
				if took := time.Since(began); took >= wakesLate {
					t.Errorf("what has found the offer has not woken the Read: it waited for %v", took)
				}
				if direct := s.Stats().DirectBytesReceived; direct != offered {
					t.Errorf("%d bytes of %d came without a copy", direct, offered)
				}
			})
		})
	}
}

// An offer that was left to a Read which then ends without it is fetched ahead, even if no other call
// follows. The idle poller had looked in between, and had left the offer to the Read.
func TestAnOfferThatAReadHasLeftIsFetchedAhead(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, byRead, session.Config{})
		s.SetSpin(time.Hour) // so that the Read polls
		d, err := p.Expose(pattern(offered), session.RemoteRead)
		if err != nil {
			t.Fatal(err)
		}
		s.TakeRead()
		_, err = s.ReadTaken(make([]byte, offered), func() bool {
			p.send(tOfferRead, 0, append(u64(1, d.Addr, d.Key, d.Len), "inline"...)...)
			pass(time.Second)
			return true
		})
		wantErr(t, "Read", err, session.ErrInterrupted)
		if n := le.Uint64(p.expectDone(t, 1, 0)); n != offered {
			t.Errorf("%d bytes of %d were fetched", n, offered)
		}
	})
}

// An offer is not left to a Read that waits for the end of a loan, but fetched ahead.
func TestAnOfferIsNotLeftToAReadBehindALoan(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		e := &fullQueue{}
		s, _, p := negotiatedOn(t, byRead, session.Config{}, func(under *twin.Endpoint) session.Endpoint {
			e.Endpoint = under
			return e
		})
		d, err := p.Expose(pattern(offered), session.RemoteRead)
		if err != nil {
			t.Fatal(err)
		}
		p.send(tOfferRead, 0, append(u64(1, d.Addr, d.Key, d.Len), "inline"...)...)
		pass(time.Second)
		if b, err := s.Peek(); string(b) != "inline" || err != nil {
			t.Fatalf("Peek: %q, %v", b, err)
		}
		r := goRead(s, make([]byte, offered))
		pass(time.Second)
		e.room.Store(true)
		go e.waker.Wake(session.SendReady)
		if n := le.Uint64(p.expectDone(t, 1, 0)); n != offered {
			t.Errorf("%d bytes of %d were fetched", n, offered)
		}
		s.Discard(0)
		if x := within(t, r); x.n == 0 || x.err != nil {
			t.Errorf("Read: %+v", x)
		}
	})
}

// Close releases a chunk that is the target of an RDMA read when the read has ended, and not before.
func TestCloseLeavesWhatIsBeingFetched(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, b, _, eb := pair(t, byRead, session.Config{})
		eb.Hold(twin.HoldReads)
		data := pattern(500_000)
		w := goWrite(a, data)
		pass(time.Second)
		go b.Close()
		pass(latency)
		if eb.Left().Allocated == 0 {
			t.Error("the memory that an RDMA read writes to was given back")
		}
		eb.Hold(0)
		if x := within(t, w); x.n != len(data) || x.err != nil {
			t.Errorf("Write: %+v", x)
		}
		pass(time.Second)
		if left := eb.Left().Allocated; left != 0 {
			t.Errorf("%d bytes are kept", left)
		}
	})
}

// A Read whose transfer finds the queue full waits for room.
func TestADirectReadWaitsForRoom(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		e := &fullQueue{}
		s, _, p := negotiatedOn(t, byRead, session.Config{}, func(under *twin.Endpoint) session.Endpoint {
			e.Endpoint = under
			return e
		})
		data, into := pattern(100_000), make([]byte, 100_000)
		d, err := p.Expose(data, session.RemoteRead)
		if err != nil {
			t.Fatal(err)
		}
		r := goRead(s, into)
		pass(time.Second)
		p.send(tOfferRead, 0, u64(1, d.Addr, d.Key, d.Len)...)
		pass(time.Second)
		e.room.Store(true)
		if session.Events(e.armed.Load())&session.SendReady != 0 {
			go e.waker.Wake(session.SendReady)
		}
		if x := within(t, r); x.n != len(data) || x.err != nil || !bytes.Equal(into, data) {
			t.Errorf("Read: %+v", x)
		}
	})
}

// A Read that Abort ends in the middle of its transfers returns what had arrived.
func TestAbortLeavesADirectReadWhatHadArrived(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		cfg := byRead
		cfg.Limits.MaxRDMA = 10_000
		s, e, p := negotiated(t, cfg, session.Config{})
		data, into := pattern(200_000), make([]byte, 300_000)
		d, err := p.Expose(data, session.RemoteRead)
		if err != nil {
			t.Fatal(err)
		}
		r := goRead(s, into)
		pass(time.Second)
		const before = "before "
		p.send(tData, 0, []byte(before)...)
		p.send(tOfferRead, 0, u64(1, d.Addr, d.Key, d.Len)...)
		p.send(tPong, 0)
		pass(5 * latency / 2) // the first reads have completed, the next are in progress
		e.Hold(twin.HoldReads)
		pass(time.Second)
		s.Abort()
		x := within(t, r)
		want := append([]byte(before), data...)
		moved := x.n - len(before)
		if moved <= 0 || moved >= len(data) || address(into[x.n:])%uintptr(cfg.Limits.MaxRDMA) != 0 || x.err != nil || !bytes.Equal(into[:x.n], want[:x.n]) {
			t.Errorf("Read: %+v", x)
		}
		_, err = s.Read(into)
		wantErr(t, "the next Read", err, session.ErrClosed)
	})
}

// A cancelled offer ends with what was fetched, whether or not a Read had begun to take it, and the
// stream continues after it.
func TestACancelledOfferEndsWithWhatWasFetched(t *testing.T) {
	for _, reading := range []int{0, 10} {
		t.Run(fmt.Sprint(reading), func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				s, _, p := negotiated(t, byRead, session.Config{KeepAlive: -1, ReceiveBudget: 1})
				data := pattern(40_000)
				d, err := p.Expose(data, session.RemoteRead)
				if err != nil {
					t.Fatal(err)
				}
				p.send(tOfferRead, 0, append(u64(1, d.Addr, d.Key, d.Len), "payload"...)...)
				pass(time.Second)
				begin := readFull(t, s, reading)
				p.send(tCancelRead, 0, u64(1)...)
				count := int(le.Uint64(p.expectDone(t, 1, 0)))
				if count == 0 || count >= len(data) {
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
				pass(time.Second)
				go s.Close()
				p.expect(tCloseAck)
				p.expect(tClose)
			})
		})
	}
}

// The ReadDone of a cancelled offer is sent after the RDMA reads in progress have ended: the offerer
// revokes the memory when it gets the message.
func TestACancelledOfferEndsBehindItsReads(t *testing.T) {
	for name, reading := range map[string]bool{"by a Read": true, "ahead": false} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				s, e, p := negotiated(t, byRead, session.Config{})
				data, into := pattern(100_000), make([]byte, 100_000)
				d, err := p.Expose(data, session.RemoteRead)
				if err != nil {
					t.Fatal(err)
				}
				e.Hold(twin.HoldReads)
				var r <-chan result
				if reading {
					r = goRead(s, into)
					pass(time.Second)
				}
				p.send(tOfferRead, 0, u64(1, d.Addr, d.Key, d.Len)...)
				pass(time.Second)
				p.send(tCancelRead, 0, u64(1)...)
				if m := p.recv(); m != nil && m[0] != tCredit {
					t.Fatalf("a message of type %d", m[0])
				}
				e.Hold(0)
				n := int(le.Uint64(p.expectDone(t, 1, 0)))
				if !reading {
					r = goRead(s, into)
				}
				if x := within(t, r); x.n != n || x.err != nil || !bytes.Equal(into[:n], data[:n]) {
					t.Errorf("Read: %+v; the peer was told of %d", x, n)
				}
			})
		})
	}
}

// Memory that was meant for a cancelled offer's bytes is released, and the next bytes do not wait for
// it.
func TestACancelledOfferLeavesNothingBehind(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		e := &fullQueue{}
		s, _, p := negotiatedOn(t, byRead, session.Config{}, func(under *twin.Endpoint) session.Endpoint {
			e.Endpoint = under
			return e
		})
		d, err := p.Expose(make([]byte, 100_000), session.RemoteRead)
		if err != nil {
			t.Fatal(err)
		}
		p.send(tOfferRead, 0, u64(1, d.Addr, d.Key, d.Len)...)
		pass(time.Second)
		p.send(tCancelRead, 0, u64(1)...)
		if n := le.Uint64(p.expectDone(t, 1, 0)); n != 0 {
			t.Errorf("%d bytes were fetched", n)
		}
		p.send(tData, 0, []byte("behind")...)
		if got := readFull(t, s, 6); string(got) != "behind" {
			t.Errorf("%q", got)
		}
		if left := e.Left(); left.Allocated != 0 {
			t.Errorf("kept: %+v", left)
		}
	})
}

// Small offers that were read are no longer counted in the budget: the next ones are fetched ahead,
// however many they are.
func TestSmallOffersLeaveTheBudget(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, b, _, _ := pair(t, byRead, session.Config{Threshold: 2 << 10, ReceiveBudget: 16 << 10})
		data := pattern(3000)
		for i := range 100 {
			if x := within(t, goWrite(a, data)); x.n != len(data) || x.err != nil { // nobody reads
				t.Fatalf("Write %d: %+v", i, x)
			}
			if !bytes.Equal(readFull(t, b, len(data)), data) {
				t.Fatal("wrong bytes")
			}
		}
		if n := a.Stats().OffersSent; n != 100 {
			t.Errorf("%d were offered", n)
		}
	})
}
