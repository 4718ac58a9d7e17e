package session_test

import (
	"bytes"
	"math"
	"testing"
	"time"

	"github.com/sanconn/san/session"
	"github.com/sanconn/san/session/twin"
)

const (
	firstBox = 20_000
	mostBox  = 200_000
)

// growing begins with boxes of firstBox bytes.
func growing() twin.Config {
	cfg := boxed
	cfg.Limits.InboxFirst = firstBox
	return cfg
}

// growingPair has boxes of firstBox bytes at first, and of mostBox at most.
func growingPair(t *testing.T) (a, b *session.Session, boxes func() (out, in int)) {
	a, b, ea, eb := pair(t, growing(), session.Config{SendBudget: mostBox})
	return a, b, func() (out, in int) {
		pass(time.Second / 10) // what is on its way arrives
		return ea.Left().Allocated, eb.Left().Allocated
	}
}

// goWriteAll writes data, so many bytes at a time.
func goWriteAll(s *session.Session, data []byte, size int) <-chan result {
	done := make(chan result, 1)
	go func() {
		n, err := 0, error(nil)
		for n < len(data) && err == nil {
			var k int
			k, err = s.Write(data[n:min(n+size, len(data))])
			n += k
		}
		done <- result{n, err}
	}()
	return done
}

// puts are the ways to write p.
var puts = map[string]func(a *session.Session, p []byte) error{
	"Write": func(a *session.Session, p []byte) error {
		_, err := a.Write(p)
		return err
	},
	"Reserve": func(a *session.Session, p []byte) error {
		for len(p) > 0 {
			room, err := a.Reserve(len(p))
			if err != nil {
				return err
			}
			n := copy(room, p)
			if err := a.Commit(n); err != nil {
				return err
			}
			p = p[n:]
		}
		return nil
	},
}

// A program that writes little at a time keeps small boxes, however often it writes.
func TestBoxesStaySmallWithLittleUse(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, b, boxes := growingPair(t)
		data := pattern(15_000)
		for range 50 {
			writeAll(t, a, data, len(data))
			readFull(t, b, len(data))
			pass(time.Second / 50)
		}
		if out, in := boxes(); out != firstBox || in != firstBox {
			t.Errorf("boxes of %d and %d bytes", out, in)
		}
	})
}

// A stream that finds its boxes full has larger ones, at both ends, in the middle of it, and
// loses nothing by that; also if it is lent its room, and if its reader is slow.
func TestBoxesGrowWithUse(t *testing.T) {
	for name, put := range puts {
		for pace, pause := range map[string]time.Duration{"quick": 0, "slow": time.Millisecond} {
			t.Run(name+", "+pace, func(t *testing.T) {
				inBubble(t, func(t *testing.T) {
					a, b, boxes := growingPair(t)
					data := pattern(4_000_000)
					done := make(chan error, 1)
					go func() {
						for at := 0; at < len(data); at += 40_000 {
							if err := put(a, data[at:at+40_000]); err != nil {
								done <- err
								return
							}
						}
						done <- nil
					}()
					for at := 0; at < len(data); at += 10_000 {
						if got := readFull(t, b, 10_000); !bytes.Equal(got, data[at:at+10_000]) {
							t.Fatalf("wrong bytes behind %d", at)
						}
						pass(pause)
					}
					if err := <-done; err != nil {
						t.Fatal(err)
					}
					if out, in := boxes(); out != mostBox || in != mostBox {
						t.Errorf("boxes of %d and %d bytes, want %d", out, in, mostBox)
					}
					if n := a.Stats().OfferedBytesSent; n < uint64(len(data))*9/10 {
						t.Errorf("%d bytes of %d by RDMA", n, len(data))
					}
				})
			})
		}
	}
}

// An inbox that is asked for while the one before it has bytes opens behind those, as large
// as it is asked for.
func TestTheNextInboxOpensBehindTheLast(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, ep, p := negotiated(t, boxed, session.Config{ReceiveBudget: mostBox})
		d := p.ask()
		if d.Len != mostBox {
			t.Errorf("an inbox of %d bytes for a question without a length", d.Len)
		}
		data := pattern(1000)
		p.fill(d, 0, data)
		p.send(tLeaveInbox, 0)
		p.send(tAskInbox, 0, u64(firstBox)...)
		if m := p.recv(); m != nil {
			t.Fatalf("a message of type %d before all was read", m[0])
		}
		if got := readFull(t, s, len(data)); !bytes.Equal(got, data) {
			t.Error("wrong bytes")
		}
		if b := p.expect(tInbox); le.Uint64(b[8+16:]) != firstBox {
			t.Errorf("an inbox of %d bytes, want %d", le.Uint64(b[8+16:]), firstBox)
		}
		p.send(tLeaveInbox, 0)
		pass(time.Second)
		if left := ep.Left(); left.Exposed != 0 || left.Allocated != 0 {
			t.Errorf("kept: %+v", left)
		}
	})
}

// A Write for which there is room does not wait for the peer to read, also if the box is to
// have a larger one take its place.
func TestAnOutgrownBoxTakesWhatItHasRoomFor(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, b, _ := growingPair(t)
		writeAll(t, a, pattern(15_000), 15_000)
		readFull(t, b, 15_000)
		pass(time.Second / 10)
		w := goWrite(a, pattern(62_000))
		got := 0
		for range 6 { // the box is found full each time
			readFull(t, b, 6_000)
			got += 6_000
			pass(time.Millisecond)
		}
		within(t, w)
		for _, n := range []int{9_000, 0} {
			if r := within(t, goWrite(a, pattern(n))); r.n != n || r.err != nil {
				t.Errorf("Write of %d bytes: %+v", n, r)
			}
		}
	})
}

// Boxes that were left begin small again.
func TestBoxesBeginSmallAgain(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, b, boxes := growingPair(t)
		data := pattern(40_000)
		for range 50 {
			w := goWrite(a, data)
			readFull(t, b, len(data))
			within(t, w)
		}
		if out, _ := boxes(); out == firstBox {
			t.Errorf("a box of %d bytes for Writes of %d", out, len(data))
		}
		pass(10 * time.Second)
		for range 2 { // the first one has the inbox asked for
			writeAll(t, a, data[:15_000], 15_000)
			readFull(t, b, 15_000)
			pass(time.Second / 10)
		}
		if out, in := boxes(); out != firstBox || in != firstBox {
			t.Errorf("boxes of %d and %d bytes behind a rest, want %d", out, in, firstBox)
		}
	})
}

// A loan that waits for room has found the box full once, however often it looks.
func TestALoanThatWaitsFindsTheBoxFullOnce(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, b, boxes := growingPair(t)
		lend := func(n int) {
			for n > 0 {
				room, err := a.Reserve(n)
				if err != nil {
					t.Error(err)
					return
				}
				n -= len(room)
				if err := a.Commit(len(room)); err != nil {
					t.Error(err)
				}
			}
		}
		lend(15_000)
		readFull(t, b, 15_000)
		pass(time.Second / 10)
		done := make(chan struct{})
		go func() { lend(2*firstBox + 5000); close(done) }()
		pass(time.Second / 10) // the last loan waits
		readFull(t, b, 2*firstBox+5000)
		<-done
		pass(time.Second / 10)
		lend(15_000)
		readFull(t, b, 15_000)
		if out, in := boxes(); out != 4*firstBox || in != firstBox { // the first grew as nobody read
			t.Errorf("boxes of %d and %d bytes", out, in)
		}
	})
}

// An inbox is never larger than it is asked for: there is none for what is too little to be of
// use, and the budget bounds what is too much.
func TestAnInboxIsNoLargerThanAskedFor(t *testing.T) {
	for length, want := range map[uint64]uint64{
		1: 0, 8191: 0, 8192: 8192, firstBox: firstBox, mostBox + 1: mostBox, 1 << 31: mostBox, math.MaxUint64: mostBox,
	} {
		inBubble(t, func(t *testing.T) {
			_, _, p := negotiated(t, boxed, session.Config{ReceiveBudget: mostBox})
			p.send(tAskInbox, 0, u64(length)...)
			if b := p.expect(tInbox); le.Uint64(b[8+16:]) != want {
				t.Errorf("an inbox of %d bytes for %d, want %d", le.Uint64(b[8+16:]), length, want)
			}
		})
	}
}

// Two ends that write before they read have the room of the largest boxes, as each box grows
// by itself when the peer's application alone could make room. It reads nothing yet.
func TestABoxGrowsThoughNobodyReads(t *testing.T) {
	for name, put := range puts {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				a, b, boxes := growingPair(t)
				writeAll(t, a, pattern(15_000), 15_000) // has the inbox asked for
				readFull(t, b, 15_000)
				pass(time.Second / 10)
				data := pattern(mostBox)
				for at := 0; at < len(data); at += 10_000 {
					done := make(chan result, 1)
					go func() { done <- result{err: put(a, data[at:at+10_000])} }()
					if r := within(t, done); r.err != nil {
						t.Fatal(r.err)
					}
				}
				if out, in := boxes(); out != mostBox || in != firstBox {
					t.Errorf("boxes of %d and %d bytes, want %d and %d", out, in, mostBox, firstBox)
				}
				if got := readFull(t, b, len(data)); !bytes.Equal(got, data) {
					t.Error("wrong bytes")
				}
			})
		})
	}
}

// Memory for a larger inbox may be that of the one before: it is looked for behind that one's end.
func TestTheNextInboxHasTheMemoryOfTheLast(t *testing.T) {
	for _, unread := range []int{0, 1000} {
		inBubble(t, func(t *testing.T) {
			s, _, p := negotiatedOn(t, boxed, session.Config{}, withMemory(func(m session.Memory) session.Memory {
				return &oneAlloc{Memory: m}
			}))
			d, data := p.ask(), pattern(unread)
			if unread > 0 {
				p.fill(d, 0, data)
			}
			p.send(tLeaveInbox, 0)
			p.send(tAskInbox, 0, u64(firstBox)...)
			readFull(t, s, unread)
			if b := p.expect(tInbox); le.Uint64(b[8+16:]) != firstBox {
				t.Errorf("an inbox of %d bytes, want %d", le.Uint64(b[8+16:]), firstBox)
			}
		})
	}
}

// A box that finds no memory to grow is not tried again by each look of the Write that waits.
func TestABoxWithoutMemoryToGrowWaits(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		cfg := growing()
		allocs := 0
		s, _, p := negotiatedOn(t, cfg, session.Config{SendBudget: mostBox}, withMemory(func(m session.Memory) session.Memory {
			return &shortMemory{m, func(n int) []byte {
				allocs++
				return m.Alloc(min(n, firstBox))
			}}
		}))
		p.open(s, firstBox)
		w := goWriteAll(s, pattern(4*firstBox), 10_000)
		for range 100 {
			pass(latency)
			p.send(tCredit, 0) // the Write looks
		}
		if allocs != 2 {
			t.Errorf("memory was looked for %d times", allocs)
		}
		s.Abort()
		within(t, w)
	})
}

// A peer that has no memory for a larger inbox gets the rest as messages, in order.
func TestNoLargerInboxMeansMessages(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		cfg := growing()
		s, ep, p := negotiated(t, cfg, session.Config{KeepAlive: -1, SendBudget: 2 * firstBox})
		in := p.open(s, firstBox)
		data := pattern(400_000)
		done := goWriteAll(s, data, 50_000)
		var got, boxed []byte
		for refused := false; len(got) < len(data); {
			m := p.recv()
			if m == nil {
				t.Fatalf("nothing comes behind %d bytes", len(got))
			}
			switch body := m[header:]; m[0] {
			case tData:
				got = append(got, body...)
				p.send(tCredit, 0)
			case tFill:
				for range le.Uint32(body) {
					got = append(got, in.mem[in.at%len(in.mem)])
					in.at++
				}
				boxed = got
				if !refused {
					in.emptied()
				}
			case tLeaveInbox:
				refused = true
			case tAskInbox:
				if n := le.Uint64(body); refused && n != 2*firstBox {
					t.Errorf("an inbox of %d bytes is asked for", n)
				}
				p.send(tInbox, 0, make([]byte, 32)...)
			}
		}
		if r := within(t, done); r.err != nil {
			t.Fatal(r.err)
		}
		if !bytes.Equal(got, data) {
			t.Error("wrong bytes")
		}
		if len(boxed) < firstBox || len(boxed) == len(data) {
			t.Errorf("%d bytes of %d through the inbox", len(boxed), len(data))
		}
		writeAll(t, s, data[:50_000], 50_000)
		p.data(50_000)
		if left := ep.Left(); left.Allocated != 0 {
			t.Errorf("it keeps a box of %d bytes", left.Allocated)
		}
	})
}

// The refusal of a larger inbox may come while a Write looks for memory for a larger box:
// whatever it finds, nothing that was written is lost or stays.
func TestNoLargerInboxWhileTheBoxGrows(t *testing.T) {
	for name, found := range map[string]func(b []byte) []byte{
		"nothing": func([]byte) []byte { return nil },
		"memory":  func(b []byte) []byte { return b },
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) { growsDuringRefusal(t, found) })
		})
	}
}

func growsDuringRefusal(t *testing.T, found func(b []byte) []byte) {
	looking, refused := make(chan struct{}), make(chan struct{})
	allocs := 0
	cfg := growing()
	cfg.Limits.Window, cfg.Limits.MaxMessage = session.MinWindow, 1024 // not all of a box leaves in messages at once
	s, _, p := negotiatedOn(t, cfg, session.Config{KeepAlive: -1, SendBudget: mostBox}, withMemory(func(m session.Memory) session.Memory {
		return &shortMemory{m, func(n int) []byte {
			if allocs++; allocs != 2 { // the first is for the first box
				return m.Alloc(n)
			}
			close(looking)
			<-refused
			b := m.Alloc(n)
			if got := found(b); got == nil {
				m.Free(b)
				return nil
			}
			return b
		}}
	}))
	in := p.open(s, 10*firstBox) // never full: only the larger one makes the box wait
	data := pattern(20 * firstBox)
	read := goRead(s, make([]byte, 1)) // takes what comes meanwhile
	w := goWriteAll(s, data, 40_000)
	var got []byte
	for grown := false; len(got) < len(data); {
		m := p.recv()
		if m == nil {
			t.Fatalf("nothing comes behind %d bytes of %d", len(got), len(data))
		}
		switch body := m[header:]; m[0] {
		case tData:
			got = append(got, body...)
			p.send(tCredit, 0)
		case tFill:
			for range le.Uint32(body) {
				got = append(got, in.mem[in.at%len(in.mem)])
				in.at++
			}
			if !grown {
				in.emptied()
			}
			p.send(tCredit, 0)
		case tLeaveInbox:
			grown = true
		case tAskInbox:
			if grown {
				<-looking
			}
			p.send(tInbox, 0, make([]byte, 32)...)
			if pass(time.Second / 10); grown {
				close(refused)
				grown = false
			}
		}
	}
	if r := within(t, w); r.err != nil {
		t.Fatal(r.err)
	}
	if !bytes.Equal(got, data) {
		t.Error("wrong bytes")
	}
	p.send(tData, 0, 'x')
	within(t, read)
}

// outgrow writes data until a larger inbox is asked for.
func outgrow(s *session.Session, p *raw, data []byte) <-chan result {
	in := p.open(s, 10*firstBox)
	w := goWriteAll(s, data, 40_000)
	for m := p.recv(); m[0] != tAskInbox; m = p.recv() {
		if m[0] == tFill {
			in.at += int(le.Uint32(m[header:]))
			in.emptied()
			p.send(tCredit, 0)
		}
	}
	return w
}

// A box that a refusal has made plain asks for no inbox: it could not use it.
func TestARefusedBoxAsksForNoInbox(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		cfg := growing()
		cfg.Limits.Window, cfg.Limits.MaxMessage = session.MinWindow, 1024
		s, _, p := negotiated(t, cfg, session.Config{KeepAlive: -1, SendBudget: mostBox})
		data := pattern(400_000)
		w := outgrow(s, p, data)
		p.send(tInbox, 0, make([]byte, 32)...)
		for range 40 { // more than the Writes that do without, after a refusal
			pass(latency)
			s.InterruptWrite(true)
			wantErr(t, "Write", within(t, w).err, session.ErrInterrupted)
			s.InterruptWrite(false)
			w = goWrite(s, data[:20_000])
		}
		for m := p.recv(); m != nil; m = p.recv() {
			if m[0] == tAskInbox {
				t.Error("an inbox is asked for")
			}
		}
		s.Abort()
		within(t, w)
	})
}

// A Write that ends before the refusal of a larger inbox leaves a box behind: without another
// one, that is given back as well, like one that is idle.
func TestARefusedBoxIsGivenBack(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		cfg := growing()
		s, ep, p := negotiated(t, cfg, session.Config{KeepAlive: -1, SendBudget: 2 * firstBox})
		w := outgrow(s, p, pattern(400_000))
		s.InterruptWrite(true)
		wantErr(t, "Write", within(t, w).err, session.ErrInterrupted)
		if ep.Left().Allocated == 0 {
			t.Error("no box is left behind")
		}
		p.send(tInbox, 0, make([]byte, 32)...)
		for m := p.recv(); m != nil; m = p.recv() {
			p.send(tCredit, 0)
		}
		pass(3 * time.Second)
		if n := ep.Left().Allocated; n != 0 {
			t.Errorf("it keeps a box of %d bytes", n)
		}
	})
}
