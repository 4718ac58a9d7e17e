package session_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sanconn/san/session"
	"github.com/sanconn/san/session/twin"
)

// writeAll writes data in Writes of size bytes that must not wait.
func writeAll(t *testing.T, s *session.Session, data []byte, size int) {
	t.Helper()
	for len(data) > 0 {
		n := min(size, len(data))
		if r := within(t, goWrite(s, bytes.Clone(data[:n]))); r.n != n || r.err != nil {
			t.Fatalf("Write: %+v", r)
		}
		data = data[n:]
	}
}

func (p *raw) data(n int) (b []byte) {
	p.t.Helper()
	for len(b) < n {
		b = append(b, p.expect(tData)...)
		p.send(tCredit, 0)
	}
	return b
}

// rawInbox is one that the test has opened for the session.
type rawInbox struct {
	p   *raw
	mem []byte
	at  int // the next byte to be read
}

// open answers the session's question with an inbox of n bytes, which a Write had
// to ask for first; its bytes come as messages.
func (p *raw) open(s *session.Session, n int) *rawInbox {
	p.t.Helper()
	first := pattern(p.Limits().Inbox)
	w := goWrite(s, first)
	p.expect(tAskInbox)
	if got := p.data(len(first)); !bytes.Equal(got, first) {
		p.t.Error("wrong bytes before there is an inbox")
	}
	if r := within(p.t, w); r.n != len(first) || r.err != nil {
		p.t.Fatalf("Write: %+v", r)
	}
	in := &rawInbox{p: p, mem: make([]byte, n)}
	d, err := p.Expose(in.mem, session.RemoteWrite)
	if err != nil {
		p.t.Fatal(err)
	}
	p.send(tInbox, 0, u64(0, d.Addr, d.Key, d.Len)...)
	pass(time.Second / 2) // it is left after one without a Write
	return in
}

// read takes n bytes that Fills speak of, and says how many Fills those were.
func (in *rawInbox) read(n int) (b []byte, fills int) {
	in.p.t.Helper()
	for ; len(b) < n; fills++ {
		for k := int(le.Uint32(in.p.expect(tFill))); k > 0; k-- {
			b = append(b, in.mem[in.at%len(in.mem)])
			in.at++
		}
		in.p.send(tCredit, 0)
	}
	return b, fills
}

// emptied tells the session what has been read.
func (in *rawInbox) emptied() { in.p.send(tEmptied, 0, u64(0, uint64(in.at))...) }

// D8: Writes of moderate size return at once, and go through the peer's inbox,
// round and round; small ones go as messages.
func TestOutbox(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, boxed, session.Config{KeepAlive: -1})
		in := p.open(s, 100_000)
		data := pattern(1_000_000)
		for at := 0; at < len(data); at += 40_000 {
			writeAll(t, s, data[at:at+40_000], 20_000)
			if got, _ := in.read(40_000); !bytes.Equal(got, data[at:at+40_000]) {
				t.Fatalf("wrong bytes behind %d", at)
			}
			in.emptied()
			pass(time.Second / 100)
		}
		pass(time.Second) // what is said is heard
		writeAll(t, s, data[:500], 100)
		if got := p.data(500); !bytes.Equal(got, data[:500]) {
			t.Error("wrong bytes of small Writes")
		}
		if st := s.Stats(); st.OfferedBytesSent != uint64(len(data)) || st.OffersSent != 0 {
			t.Errorf("%d bytes by RDMA and %d offers", st.OfferedBytesSent, st.OffersSent)
		}
	})
}

// What does not fit the inbox waits in the outbox; a Write that does not fit there
// waits itself. Small Writes stay behind. Nothing is lost, and Close comes last.
func TestOutboxIsFull(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, boxed, session.Config{KeepAlive: -1, SendBudget: 60_000})
		in := p.open(s, 50_000)
		data := pattern(120_000)
		writeAll(t, s, data[:100_000], 20_000) // 50,000 are there, 50,000 here
		writeAll(t, s, data[100_000:101_000], 100)
		w := goWrite(s, data[101_000:])
		got, _ := in.read(50_000)
		synctest.Wait()
		select {
		case r := <-w:
			t.Fatalf("a Write that finds no room returned %+v", r)
		default:
		}
		in.emptied()
		rest, _ := in.read(50_000)
		if r := within(t, w); r.n != 19_000 || r.err != nil {
			t.Fatalf("Write: %+v", r)
		}
		go s.Close()
		in.emptied()
		last, _ := in.read(20_000)
		p.expect(tClose)
		if got = append(append(got, rest...), last...); !bytes.Equal(got, data) {
			t.Error("wrong bytes")
		}
	})
}

// What a Write begins with goes at once; behind it, as much at a time as is on its way,
// and as still comes.
func TestPiecesOfALongWrite(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		dear := boxed
		dear.Limits.InboxTo = 4 << 20
		s, _, p := negotiated(t, dear, session.Config{})
		in := p.open(s, 4<<20)
		data := pattern(2 << 20)
		for range 2 {
			writeAll(t, s, data, len(data))
			got, pieces := in.read(len(data)) // 128 KiB twice, 256, 512 twice, 256, 128 twice
			if !bytes.Equal(got, data) || pieces != 8 {
				t.Errorf("%d pieces, right bytes: %v", pieces, bytes.Equal(got, data))
			}
			in.emptied()
		}
	})
}

// An outbox that cannot be registered any more: what Writes have left there goes as payload,
// in its place, and so do later ones, for long.
func TestOutboxThatCannotBeRegistered(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, writes, p := failing(t)
		in := p.open(s, 30_000)
		data := pattern(60_000)
		writeAll(t, s, data[:40_000], 10_000) // by RDMA, and waiting for room
		writes.fail.Store(true)
		got, _ := in.read(30_000)
		in.emptied()
		behind := goWrite(s, data[40_000:40_010])
		got = append(got, p.data(10_010)...)
		within(t, behind)
		w := goWrite(s, data[40_010:])
		for len(got) < len(data) {
			if m := p.recv(); m[0] == tData {
				got = append(got, m[header:]...)
				p.send(tCredit, 0)
			} else if m[0] != tLeaveInbox {
				t.Fatalf("a message of type %d", m[0])
			}
		}
		if within(t, w); !bytes.Equal(got, data) {
			t.Error("wrong bytes")
		}
		if n := writes.failed.Load(); n != 1 {
			t.Errorf("%d attempts with that memory", n)
		}
		rounds := 0
		for asked := false; !asked && rounds < 2000; rounds++ {
			w := goWrite(s, data[:10_000])
			for n := 0; n < 10_000; {
				switch m := p.recv(); m[0] {
				case tData:
					n += len(m) - header
					p.send(tCredit, 0)
				case tAskInbox:
					asked = true
				}
			}
			within(t, w)
		}
		if rounds < 1000 || rounds == 2000 {
			t.Errorf("asked for another after %d Writes", rounds)
		}
	})
}

// A stream that never pauses gives up an outbox that is of no use, too.
func TestStreamLeavesAUselessOutbox(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, writes, p := failing(t)
		in := p.open(s, 100_000)
		go func() {
			for {
				if _, err := s.Write(pattern(10_000)); err != nil {
					return // the test is over
				}
			}
		}()
		pass(time.Second / 2) // both boxes are full
		writes.fail.Store(true)
		in.read(100_000)
		in.emptied()
		for n := 0; ; {
			switch m := p.recv(); m[0] {
			case tData:
				p.send(tCredit, 0)
				if n += len(m) - header; n > 10<<20 {
					t.Fatalf("%d bytes on, it still has it", n)
				}
			case tLeaveInbox:
				return
			}
		}
	})
}

// failingWrites cannot register what it is to write from.
type failingWrites struct {
	session.Memory
	fail   atomic.Bool
	failed atomic.Int32
}

func (e *failingWrites) Write(from []byte, to session.Descriptor, off int, id uint32) error {
	if e.fail.Load() {
		e.failed.Add(1)
		return syscall.ENOBUFS
	}
	return e.Memory.Write(from, to, off, id)
}

// failing is a session on such an endpoint.
func failing(t *testing.T) (s *session.Session, w *failingWrites, p *raw) {
	t.Helper()
	w = new(failingWrites)
	s, _, p = negotiatedOn(t, boxed, session.Config{}, withMemory(func(m session.Memory) session.Memory {
		w.Memory = m
		return w
	}))
	return s, w, p
}

// Where exposing memory costs as much as the copy, Writes above the threshold go
// through the inbox as well; but not if a threshold was asked for, nor from InboxTo on.
func TestInboxTo(t *testing.T) {
	dear := boxed
	dear.Limits.InboxTo = 128 << 10
	for _, tt := range []struct {
		size, threshold int
		offered         bool
	}{
		{100_000, 0, false},
		{100_000, 64 << 10, true},
		{128 << 10, 0, true},
	} {
		t.Run(fmt.Sprint(tt.size, " ", tt.threshold), func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				s, _, p := negotiated(t, dear, session.Config{KeepAlive: -1, Threshold: tt.threshold})
				in := p.open(s, 1<<20)
				data := pattern(tt.size)
				w := goWrite(s, data)
				if tt.offered {
					p.expect(tOfferRead)
					s.Abort()
				} else if got, _ := in.read(tt.size); !bytes.Equal(got, data) {
					t.Error("wrong bytes")
				}
				<-w
			})
		})
	}
}

// A peer without memory for an inbox gets messages, and is asked again later. So
// is one whose inbox this end has no memory to send to.
func TestNoMemoryForAnInbox(t *testing.T) {
	write := func(t *testing.T, s *session.Session, p *raw, asked bool) {
		t.Helper()
		data := pattern(10_000)
		w := goWrite(s, data)
		if asked {
			p.expect(tAskInbox)
		}
		if got := p.data(len(data)); !bytes.Equal(got, data) {
			t.Error("wrong bytes")
		}
		if r := within(t, w); r.n != len(data) || r.err != nil {
			t.Errorf("Write: %+v", r)
		}
	}
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, boxed, session.Config{KeepAlive: -1})
		const skipShort = 32
		for range 3 {
			write(t, s, p, true)
			p.send(tInbox, 0, u64(0, 0, 0, 0)...)
			pass(time.Second)
			for range skipShort {
				write(t, s, p, false)
			}
		}
	})
	inBubble(t, func(t *testing.T) {
		poor := boxed
		poor.Faults.Alloc = 1
		s, _, p := negotiated(t, poor, session.Config{KeepAlive: -1})
		p.open(s, 100_000)
		w := goWrite(s, pattern(10_000))
		p.expect(tLeaveInbox)
		p.data(10_000)
		within(t, w)
	})
}

// A connection that does nothing gives both boxes back, once all was read, and
// gets others when it is used again.
func TestBoxesOfAnIdleConnection(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, b, ea, eb := pair(t, boxed, session.Config{})
		data := pattern(50_000)
		writeAll(t, a, data, 10_000) // asks, while it goes by messages
		readFull(t, b, len(data))
		for range 3 {
			writeAll(t, a, data, 10_000)
			pass(time.Second / 2)
			if eb.Left().Exposed != 1 || ea.Left().Allocated == 0 {
				t.Fatal("there is no inbox, or no outbox")
			}
			pass(time.Minute)
			if eb.Left().Exposed != 1 {
				t.Fatal("given back before it was read")
			}
			if got := readFull(t, b, len(data)); !bytes.Equal(got, data) {
				t.Error("wrong bytes")
			}
			pass(time.Minute)
			for _, e := range []*twin.Endpoint{ea, eb} {
				if left := e.Left(); left.Exposed != 0 || left.Allocated != 0 {
					t.Errorf("kept: %+v", left)
				}
			}
			writeAll(t, a, data, 10_000) // asks again
			readFull(t, b, len(data))
		}
	})
}

// … also one that was idle twice within the second after which they are given back,
// and one at whose ends a Read waits: nobody looks at it any more.
func TestBoxesOfAConnectionThatWasIdleTwice(t *testing.T) {
	for name, waits := range map[string][2]bool{
		"nobody waits": {}, "the writer reads": {0: true}, "the reader reads": {1: true}, "both read": {true, true},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				a, b, ea, eb := pair(t, boxed, session.Config{KeepAlive: -1})
				data := pattern(50_000)
				for range 3 { // within the second, and the first asks
					writeAll(t, a, data, 10_000)
					if got := readFull(t, b, len(data)); !bytes.Equal(got, data) {
						t.Error("wrong bytes")
					}
					pass(300 * time.Millisecond)
					if eb.Left().Exposed != 1 {
						t.Fatal("there is no inbox")
					}
				}
				if ea.Left().Allocated == 0 {
					t.Fatal("there is no outbox")
				}
				for i, s := range []*session.Session{a, b} {
					if waits[i] {
						goRead(s, make([]byte, 1))
					}
				}
				pass(5 * time.Second)
				for _, e := range []*twin.Endpoint{ea, eb} {
					if left := e.Left(); left.Exposed != 0 || left.Allocated != 0 {
						t.Errorf("kept: %+v", left)
					}
				}
			})
		})
	}
}

// A peer whose inbox is of no use is told so once, also when the box of an idle
// connection is to be given back just then: twice would break the protocol.
func TestInboxIsLeftOnce(t *testing.T) {
	hear := func(t *testing.T, s *session.Session) {
		go func() {
			for buf := make([]byte, 1<<20); ; {
				if _, err := s.Read(buf); err != nil {
					if !errors.Is(err, session.ErrClosed) {
						t.Errorf("the peer reads %v", err)
					}
					return
				}
			}
		}()
	}
	const size = 16 << 10
	t.Run("no memory", func(t *testing.T) {
		inBubble(t, func(t *testing.T) {
			a, b, ea, _ := pair(t, boxed, session.Config{})
			hear(t, b)
			writeAll(t, a, pattern(size), size) // asks; goes as messages
			pass(20 * time.Millisecond)         // the inbox is there, and nothing is written: it is to be left in a while
			var all [][]byte
			for n := 1 << 20; n >= 1<<10; n /= 2 {
				for m := ea.Memory().Alloc(n); m != nil; m = ea.Memory().Alloc(n) {
					all = append(all, m)
				}
			}
			if len(all) == 0 {
				t.Fatal("nothing was allocated")
			}
			writeAll(t, a, pattern(size), size) // no memory for the outbox: leaves
			pass(2 * time.Second)
			for range 2 {
				writeAll(t, a, pattern(100), 100)
				pass(time.Second)
			}
			for _, m := range all {
				ea.Memory().Free(m)
			}
			b.Close()
		})
	})
	t.Run("no budget", func(t *testing.T) {
		inBubble(t, func(t *testing.T) {
			a, b, _, _ := pair(t, boxed, session.Config{SendBudget: 4 << 10})
			hear(t, b)
			for range 40 {
				writeAll(t, a, pattern(size), size)
				pass(100 * time.Millisecond)
			}
			b.Close()
		})
	})
}

// What the peer says of its inbox may cross our leaving it.
func TestEmptiedCrossesLeaving(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, boxed, session.Config{})
		in := p.open(s, 100_000)
		writeAll(t, s, pattern(20_000), 20_000)
		pass(5 * time.Second)
		in.read(20_000)
		in.emptied()
		p.expect(tLeaveInbox)
		pass(time.Second)
		if _, err := s.WriteUrgent([]byte("alive?")); err != nil {
			t.Error(err)
		}
	})
}

// The outbox is not given back while the device reads from it.
func TestOutboxOfAWriteUnderWay(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, e, p := negotiated(t, boxed, session.Config{})
		in := p.open(s, 100_000)
		data := pattern(20_000)
		e.Hold(twin.HoldWrites)
		writeAll(t, s, data, len(data))
		pass(5 * time.Second)
		if e.Left().Allocated == 0 {
			t.Error("the memory was given back")
		}
		e.Hold(0)
		pass(latency)
		if got, _ := in.read(len(data)); !bytes.Equal(got, data) {
			t.Error("wrong bytes")
		}
		pass(5 * time.Second)
		p.expect(tLeaveInbox)
	})
}

// slowAlloc takes long to find memory.
type slowAlloc struct{ session.Memory }

func (e slowAlloc) Alloc(n int) []byte {
	nap(3 * time.Second)
	return e.Memory.Alloc(n)
}

// … nor is the inbox left while a Write gets the outbox that goes with it.
func TestOutboxThatComesLate(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiatedOn(t, boxed, session.Config{}, withMemory(func(m session.Memory) session.Memory { return slowAlloc{m} }))
		in := p.open(s, 100_000)
		data := pattern(20_000)
		writeAll(t, s, data, len(data))
		if got, _ := in.read(len(data)); !bytes.Equal(got, data) {
			t.Error("wrong bytes")
		}
	})
}

// What is small stays behind what is in the outbox, several slices in one message too.
func TestSmallSlicesBehindTheOutbox(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, boxed, session.Config{})
		in := p.open(s, 10_000)
		data := pattern(20_000) // half of it has no room there
		writeAll(t, s, data, len(data))
		const behind = "behind it"
		done := make(chan result, 1)
		go func() {
			n, err := s.WriteBuffers([][]byte{[]byte(behind[:3]), []byte(behind[3:])})
			done <- result{int(n), err}
		}()
		pass(time.Second)
		got, _ := in.read(10_000)
		in.emptied()
		rest, _ := in.read(10_000)
		if got = append(got, rest...); !bytes.Equal(got, data) {
			t.Error("wrong bytes")
		}
		in.emptied()
		var last []byte
		for len(last) < len(behind) {
			m := p.recv()
			switch {
			case m == nil:
				t.Fatal("nothing comes behind it")
			case m[0] == tFill:
				for range le.Uint32(m[header:]) {
					last = append(last, in.mem[in.at%len(in.mem)])
					in.at++
				}
			case m[0] == tData:
				last = append(last, m[header:]...)
			}
		}
		if string(last) != behind {
			t.Errorf("%q", last)
		}
		if r := within(t, done); r.n != len(behind) || r.err != nil {
			t.Errorf("WriteBuffers: %+v", r)
		}
	})
}

// While nothing can be said, a later word of what was read replaces an earlier one: they
// do not pile up.
func TestEmptiedThatFindsNoRoom(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		cfg := boxed
		cfg.SendQueue = session.ControlReserve + 1
		s, _, p := negotiated(t, cfg, session.Config{ReceiveBudget: 10_000})
		p.ask()
		pass(2 * latency)
		p.Hold(twin.HoldMessages)
		for range cfg.SendQueue {
			if !p.send(tPing, 0) { // the answers fill the queue
				t.Fatal("no room for a question")
			}
		}
		pass(time.Second)
		const times = 12 // with more the peer has no credit
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

// A stream that always has RDMA writes under way does not remember those that are
// over.
func TestLengthsOfWritesThatAreOver(t *testing.T) {
	const underWay, times = 30, 100_000
	if kept := session.LengthsKept(t, underWay, times); kept > 2*underWay+1 {
		t.Errorf("%d lengths are kept, with %d writes under way", kept, underWay)
	}
}

// Nor does one whose only Write has asked, and found no use for the answer.
func TestInboxThatIsNotUsed(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, b, _, eb := pair(t, boxed, session.Config{})
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

// ask has the session open an inbox for the test.
func (p *raw) ask() session.Descriptor {
	p.t.Helper()
	p.send(tAskInbox, 0)
	b := p.expect(tInbox)
	return session.Descriptor{Addr: le.Uint64(b[8:]), Key: le.Uint64(b[16:]), Len: le.Uint64(b[24:])}
}

func (p *raw) fill(d session.Descriptor, at int, b []byte) {
	p.t.Helper()
	if err := p.Write(b, d, at, 1); err != nil {
		p.t.Fatal(err)
	}
	p.send(tFill, 0, u64(uint64(len(b)))...)
}

// The other side: what is in the inbox is read in its place in the stream, the peer
// is told of what was read, and the memory is the peer's until it leaves, and until
// all has been read.
func TestInbox(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, e, p := negotiated(t, boxed, session.Config{KeepAlive: -1, ReceiveBudget: 40_000})
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
		p.fill(d, 30_000, data[:10_000]) // to the end
		p.fill(d, 0, data[10_000:20_000])
		p.send(tLeaveInbox, 0)
		pass(time.Second)
		if e.Left().Exposed != 1 {
			t.Fatal("revoked before it was read")
		}
		if got := readFull(t, s, 20_000); !bytes.Equal(got, data[:20_000]) {
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

// An inbox that is granted late, to a connection where nobody but a Read that waits
// looks any more, is left as well.
func TestInboxThatComesLate(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, boxed, session.Config{KeepAlive: -1})
		writeAll(t, s, pattern(p.Limits().Inbox), p.Limits().Inbox)
		p.expect(tAskInbox)
		p.data(p.Limits().Inbox)
		goRead(s, make([]byte, 1))
		pass(time.Second)
		d, err := p.Expose(make([]byte, 50_000), session.RemoteWrite)
		if err != nil {
			t.Fatal(err)
		}
		p.send(tInbox, 0, u64(0, d.Addr, d.Key, d.Len)...)
		pass(5 * time.Second)
		p.expect(tLeaveInbox)
	})
}

// The inbox is left behind Close too: an end that goes on delivering is idle. What is in
// it is read all the same.
func TestInboxIsLeftBehindClose(t *testing.T) {
	data := pattern(20_000)
	t.Run("by this end", func(t *testing.T) {
		inBubble(t, func(t *testing.T) {
			s, _, p := negotiated(t, boxed, session.Config{KeepAlive: -1})
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
			s, e, p := negotiated(t, boxed, session.Config{KeepAlive: -1})
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

// A Fill of what was never written shows zeros, and not what other connections have
// left in that memory.
func TestFillThatLies(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, boxed, session.Config{KeepAlive: -1})
		if p.ask().Len < 1000 {
			t.Fatal("no inbox")
		}
		p.send(tFill, 0, u64(1000)...)
		if got := readFull(t, s, 1000); changed(got, 0) >= 0 {
			t.Errorf("it shows %x…", got[:8])
		}
	})
}

// What nobody reads is thrown away: the writer does not wait for it.
func TestInboxOfAnEndThatDoesNotRead(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, b, _, _ := pair(t, boxed, session.Config{ReceiveBudget: 50_000, SendBudget: 50_000})
		writeAll(t, a, pattern(10_000), 10_000)
		readFull(t, b, 10_000)
		pass(time.Second / 2)
		writeAll(t, a, pattern(60_000), 20_000)
		pass(time.Second / 2)
		if got := b.Stats().OfferedBytesReceived; got != 50_000 {
			t.Fatalf("%d bytes are in the inbox", got)
		}
		if err := b.CloseRead(); err != nil {
			t.Fatal(err)
		}
		for range 20 {
			if r := within(t, goWrite(a, pattern(50_000))); r.n != 50_000 || r.err != nil {
				t.Fatalf("Write: %+v", r)
			}
		}
	})
}

func TestBrokenRulesOfBoxes(t *testing.T) {
	for name, say := range map[string]func(*session.Session, *raw){
		"a Fill without an inbox": func(_ *session.Session, p *raw) { p.send(tFill, 0, u64(1)...) },
		"a Fill of nothing":       func(_ *session.Session, p *raw) { p.ask(); p.send(tFill, 0, u64(0)...) },
		"a Fill beyond":           func(_ *session.Session, p *raw) { p.send(tFill, 0, u64(p.ask().Len+1)...) },
		"two that are too much": func(_ *session.Session, p *raw) {
			p.ask()
			p.send(tFill, 0, u64(40_000)...)
			p.send(tFill, 0, u64(10_001)...)
		},
		"a Fill behind leaving":     func(_ *session.Session, p *raw) { p.ask(); p.send(tLeaveInbox, 0); p.send(tFill, 0, u64(1)...) },
		"a Fill cut short":          func(_ *session.Session, p *raw) { p.ask(); p.send(tFill, 0, 1, 0, 0) },
		"a second inbox":            func(_ *session.Session, p *raw) { p.ask(); p.send(tAskInbox, 0) },
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
				s, _, p := negotiated(t, boxed, session.Config{KeepAlive: -1, ReceiveBudget: 50_000})
				say(s, p)
				pass(time.Second)
				_, err := s.WriteUrgent([]byte("alive?"))
				wantErr(t, "the connection", err, syscall.ECONNRESET)
			})
		})
	}
}

// A peer that broke the protocol: what had arrived before is read first.
func TestArrivedBeforeAViolation(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, boxed, session.Config{KeepAlive: -1})
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

// Credit that is due while there is no room is sent as soon as there is some.
func TestCreditWaitsForRoom(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		cfg := messages
		cfg.SendQueue = session.ControlReserve + 1
		s, _, p := negotiated(t, cfg, session.Config{KeepAlive: -1})
		p.Hold(twin.HoldMessages) // what is under way to the peer stays in the session's queue
		for range cfg.SendQueue {
			p.send(tPing, 0) // the answers fill it
			pass(time.Millisecond)
		}
		const n = 12
		for range n {
			p.send(tData, 0, 1)
			pass(time.Millisecond)
		}
		readFull(t, s, n)
		pass(time.Second) // idle
		p.Hold(0)
		for deadline := time.Now().Add(time.Second); time.Now().Before(deadline); {
			if m := p.recv(); m != nil && le.Uint32(m[4:]) >= n {
				return
			}
		}
		t.Error("the peer is not told of the buffers that are free again")
	})
}

// Abort ends what Close goes on delivering.
func TestAbortAfterClose(t *testing.T) {
	for name, cfg := range map[string]twin.Config{"messages": messages, "boxed": boxed, "ring": ring} {
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

// A Write to a peer that does not read any more is thrown away there, whichever way it
// goes, until the peer has closed.
func TestWriteToAPeerThatThrowsItAway(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		a, b, _, _ := pair(t, cfg, session.Config{Threshold: 1})
		if err := b.CloseRead(); err != nil {
			t.Fatal(err)
		}
		for range 3 {
			if r := within(t, goWrite(a, pattern(50_000))); r.n != 50_000 || r.err != nil {
				t.Fatalf("Write to a peer that throws it away: %+v", r)
			}
		}
		b.Close()
		pass(time.Second)
		if _, err := a.Write(pattern(50_000)); !errors.Is(err, syscall.EPIPE) {
			t.Errorf("Write to a peer that has closed: %v", err)
		}
	})
}

// A peer that has closed writes to its inbox no more: it is given back, though the session
// is not closed.
func TestInboxOfAPeerThatHasClosed(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, b, _, eb := pair(t, boxed, session.Config{})
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

// … and may say once more that it leaves it, as it lingers.
func TestLeaveInboxBehindClose(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, boxed, session.Config{})
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

// A peer that has closed gets no inbox, though its question came behind that.
func TestAskInboxBehindClose(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, ep, p := negotiated(t, boxed, session.Config{})
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
