package session_test

import (
	"bytes"
	"errors"
	"fmt"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/session"
)

// D8: Writes of moderate size return at once, and go through the peer's inbox, whose memory is used
// again and again. Small ones go in messages.
func TestModerateWritesGoThroughTheInbox(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, buffered, session.Config{KeepAlive: -1})
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
		pass(time.Second) // for all messages to be handled
		writeAll(t, s, data[:500], 100)
		if got := p.data(500); !bytes.Equal(got, data[:500]) {
			t.Error("wrong bytes of small Writes")
		}
		if st := s.Stats(); st.OfferedBytesSent != uint64(len(data)) || st.OffersSent != 0 {
			t.Errorf("%d bytes by RDMA and %d offers", st.OfferedBytesSent, st.OffersSent)
		}
	})
}

// An inbox is requested once the Writes that it would serve amount to enough, counted since the last
// inbox was left.
func TestAnInboxIsForMoreThanOneWrite(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		seldom := buffered
		seldom.Limits.InboxAfter = 30_000
		a, b, _, eb := pair(t, seldom, session.Config{})
		data := pattern(10_000)
		write := func(times int) (there bool) {
			for range times {
				writeAll(t, a, data, len(data))
				readFull(t, b, len(data))
			}
			pass(time.Second / 4)
			return eb.Left().Exposed > 0
		}
		for range 2 {
			if write(2) {
				t.Error("an inbox for 20,000 bytes")
			}
			pass(time.Minute) // it does not matter when the next Write comes
			if !write(1) {
				t.Error("no inbox for 30,000 bytes")
			}
			pass(time.Minute)
			if left := eb.Left(); left.Exposed != 0 || left.Allocated != 0 {
				t.Errorf("kept: %+v", left)
			}
		}
	})
}

// The rest of a long Write goes through the inbox as soon as there is one.
func TestTheInboxServesTheWriteThatAskedForIt(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		dear := buffered
		dear.Limits.Threshold = 4 << 20
		a, b, _, _ := pair(t, dear, session.Config{})
		data := pattern(2 << 20)
		w := goWrite(a, data)
		if got := readFull(t, b, len(data)); !bytes.Equal(got, data) {
			t.Error("wrong bytes")
		}
		if r := within(t, w); r.n != len(data) || r.err != nil {
			t.Errorf("Write: %+v", r)
		}
		if n := a.Stats().OfferedBytesSent; n < uint64(len(data))*9/10 {
			t.Errorf("%d bytes of %d by RDMA", n, len(data))
		}
	})
}

// Two sizes separate the three ways of a Write, even if a message could take more.
func TestTheWaysMeet(t *testing.T) {
	const buffer, offer = 8 << 10, 32 << 10
	ways := withLimits(buffered, func(l *session.Limits) { l.MaxMessage, l.Inbox = 64<<10, buffer })
	inBubble(t, func(t *testing.T) {
		a, b, _, _ := pair(t, twin.Config{Limits: ways}, session.Config{Threshold: offer})
		write := func(size int) (buffered, offered uint64) {
			before := a.Stats()
			w := goWrite(a, pattern(size))
			readFull(t, b, size)
			if r := within(t, w); r.n != size || r.err != nil {
				t.Fatalf("Write: %+v", r)
			}
			st := a.Stats()
			buffered = (st.OfferedBytesSent - st.DirectBytesSent) - (before.OfferedBytesSent - before.DirectBytesSent)
			return buffered, st.OffersSent - before.OffersSent
		}
		opened := uint64(0)
		for tries := 0; opened == 0; tries++ {
			if tries == 100 {
				t.Fatal("no send buffer")
			}
			opened, _ = write(offer - 1)
		}
		for _, tt := range []struct {
			size              int
			buffered, offered uint64
		}{{buffer - 1, 0, 0}, {buffer, buffer, 0}, {offer - 1, offer - 1, 0}, {offer, 0, 1}} {
			if buffered, offered := write(tt.size); buffered != tt.buffered || offered != tt.offered {
				t.Errorf("%d bytes: %d by the send buffer, %d offers, want %d and %d", tt.size, buffered, offered, tt.buffered, tt.offered)
			}
		}
	})
}

// A small Write follows the bytes in the send buffer without waiting if there is room for all of it, and
// otherwise waits.
func TestSmallWritesBehindTheSendBuffer(t *testing.T) {
	const inbox, buffer = 2 << 10, 2900
	limits := withLimits(buffered, func(l *session.Limits) { l.MaxMessage, l.Inbox, l.InboxAfter = 1<<10, inbox, 1 })
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, twin.Config{Limits: limits}, session.Config{SendBudget: buffer, KeepAlive: -1})
		in := p.open(s, inbox)
		data := pattern(2*inbox + 100 + 1000)
		writeAll(t, s, data[:2*inbox], inbox) // the second one waits in the send buffer
		writeAll(t, s, data[2*inbox:][:100], 100)
		w := goWrite(s, data[2*inbox+100:]) // the send buffer has room for a part of this
		pass(time.Millisecond)
		select {
		case r := <-w:
			t.Errorf("Write of 1000 bytes: %+v, without room for them", r)
		default:
		}
		var got []byte
		for len(got) < len(data) {
			b, _ := in.read(min(inbox, len(data)-len(got)))
			got = append(got, b...)
			in.emptied()
			pass(time.Millisecond)
		}
		if !bytes.Equal(got, data) {
			t.Error("wrong bytes, or in another order")
		}
		if r := within(t, w); r.n != 1000 || r.err != nil {
			t.Errorf("Write of 1000 bytes: %+v", r)
		}
	})
}

// If the bytes in the send buffer leave it during a small Write, the Write does not go in a message
// without room for all of it.
func TestSmallWriteBehindASendBufferThatEmpties(t *testing.T) {
	const buffer = 5000
	limits := withLimits(buffered, func(l *session.Limits) { l.Inbox, l.InboxAfter = buffer, 1 })
	inBubble(t, func(t *testing.T) {
		e := &narrow{}
		s, _, p := negotiatedOn(t, twin.Config{Limits: limits}, session.Config{KeepAlive: -1}, func(end *twin.Endpoint) session.Endpoint {
			e.Endpoint = end
			return e
		})
		in := p.open(s, 64<<10)
		data := pattern(buffer + 3000)
		e.most.Store(8) // too little for a Fill
		writeAll(t, s, data[:buffer], buffer)
		e.most.Store(2500)
		writeAll(t, s, data[buffer:], 3000)
		got, _ := in.read(buffer)
		pass(time.Second / 4)
		if got = append(got, p.data(3000)...); !bytes.Equal(got, data) {
			t.Error("wrong bytes")
		}
	})
}

// After the end of the connection nothing is put into the send buffer.
func TestSmallWritesBehindTheEnd(t *testing.T) {
	const inbox = 2 << 10
	limits := withLimits(buffered, func(l *session.Limits) { l.MaxMessage, l.Inbox, l.InboxAfter = 1<<10, inbox, 1 })
	inBubble(t, func(t *testing.T) {
		s, e, p := negotiated(t, twin.Config{Limits: limits}, session.Config{KeepAlive: -1})
		p.open(s, inbox)
		writeAll(t, s, pattern(2*inbox), inbox) // the second one waits in the send buffer
		p.Kill()
		pass(time.Millisecond / 2) // the idle poller has not looked yet
		if e.Err() == nil {
			t.Fatal("the endpoint has not ended")
		}
		if n, err := s.Write([]byte("lost")); n != 0 || err == nil {
			t.Errorf("Write behind the end: %d, %v", n, err)
		}
	})
}

// A Write that waits and has no inbox requests one, however small its slices are: the peer may write as
// much itself before it reads.
func TestAWriteThatWaitsGetsAnInbox(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		small := buffered
		small.Limits.Inbox, small.Limits.InboxAfter = 64<<10, 1<<20
		a, _, _, _ := pair(t, small, session.Config{})
		b := pattern(200_000)
		v := [][]byte{b[:40_000], b[40_000:90_000], b[90_000:150_000], b[150_000:]}
		done := make(chan error, 1)
		go func() { _, err := a.WriteBuffers(v); done <- err }()
		pass(time.Second)
		select {
		case err := <-done:
			if err != nil {
				t.Error(err)
			}
		default:
			t.Errorf("it waits for a Read, after %d bytes", a.Stats().BytesSent)
			a.Abort()
			<-done
		}
	})
}

// What does not fit into the inbox waits in the send buffer. A Write that does not fit there waits.
// Small Writes follow, nothing is lost, and Close comes last.
func TestAWriteWaitsForAFullSendBuffer(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, buffered, session.Config{KeepAlive: -1, SendBudget: 60_000})
		in := p.open(s, 50_000)
		data := pattern(120_000)
		writeAll(t, s, data[:100_000], 20_000) // 50,000 in the inbox, 50,000 in the send buffer
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

// A Write begins with a short piece, which is sent at once. Further pieces are at most as long as what
// is in flight, and as what is left.
func TestALongWriteGoesInPieces(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		dear := buffered
		dear.OfferFrom = 4 << 20
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

// Small slices that share a message follow what is in the send buffer, too.
func TestSmallSlicesStayBehindTheSendBuffer(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, buffered, session.Config{})
		in := p.open(s, 10_000)
		data := pattern(20_000) // the inbox has no room for half of it
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

// A send buffer that finds no credit sends the rest once there is credit.
func TestTheSendBufferWaitsForCredit(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, buffered, session.Config{})
		in := p.open(s, 2<<20)
		var data []byte
		for s.Stats().Stalls == 0 { // the peer handles nothing
			if len(data) > 1<<20 {
				t.Fatal("there is no end of its credit")
			}
			b := pattern(buffered.Limits.Inbox)
			writeAll(t, s, b, len(b))
			pass(2 * latency)
			s.ReadUrgent(nil) // takes the completions, so that none comes after the last
			data = append(data, b...)
		}
		pass(time.Minute)
		if got, _ := in.read(len(data)); !bytes.Equal(got, data) {
			t.Error("wrong bytes")
		}
	})
}

// If exposing memory costs as much as copying it, Writes above the threshold go through the inbox as
// well, unless the Config sets a threshold, or the Write reaches OfferFrom.
func TestDearWritesGoThroughTheInbox(t *testing.T) {
	dear := buffered
	dear.OfferFrom = 128 << 10
	for _, tt := range []struct {
		size, threshold int
		offered         bool
	}{
		{100_000, 0, false},
		{100_000, 64 << 10, true},
		{129 << 10, 0, true},
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

// Each Fill of a Write, except the last one, has the flag that the Write continues. So has each message
// of a send buffer whose bytes go in messages.
func TestFillsSayThatAWriteGoesOn(t *testing.T) {
	const size = 300_000
	for _, plain := range []bool{true, false} {
		inBubble(t, func(t *testing.T) {
			refuse := false
			s, _, p := negotiatedOn(t, buffered, session.Config{KeepAlive: -1, Threshold: 1 << 20}, withMemory(func(m session.Memory) session.Memory {
				return refusing{m, &refuse}
			}))
			in := p.open(s, 64<<10)
			refuse = plain
			w := goWrite(s, pattern(size))
			for left := size; left > 0; {
				m := p.recv()
				if m == nil {
					t.Fatal("no message")
				}
				switch m[0] {
				case tFill:
					left -= int(le.Uint32(m[header:]))
					in.at += int(le.Uint32(m[header:]))
					in.emptied()
				case tData:
					left -= len(m) - header
				default:
					continue
				}
				if plain != (m[0] == tData) {
					t.Errorf("a message of type %d", m[0])
				}
				p.send(tCredit, 0)
				if more := m[1]&1 != 0; more != (left > 0) {
					t.Errorf("%d bytes ahead of the end: more is %v", left, more)
				}
			}
			if r := within(t, w); r.n != size || r.err != nil {
				t.Errorf("Write: %+v", r)
			}
		})
	}
}

// refusing is memory that starts no RDMA write while now is set, as if it were not registered any more.
type refusing struct {
	session.Memory
	now *bool
}

func (m refusing) Write(b []byte, d session.Descriptor, at int, tag uint32) error {
	if *m.now {
		return syscall.ENOMEM
	}
	return m.Memory.Write(b, d, at, tag)
}

// If the peer has no memory for an inbox, Writes whose memory is expensive to expose are offered
// nevertheless, as messages cost more.
func TestDearWritesAreOfferedWithoutAnInbox(t *testing.T) {
	dear := buffered
	dear.OfferFrom = 1 << 20
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, dear, session.Config{KeepAlive: -1})
		first := goWrite(s, pattern(10_000))
		p.expect(tAskInbox)
		p.data(10_000)
		within(t, first)
		p.send(tInbox, 0, u64(0, 0, 0, 0)...)
		pass(time.Second)
		const without = 32 // Writes that pass without another request; each of these counts
		for range without {
			w := goWrite(s, pattern(100_000))
			b := p.expect(tOfferRead)
			p.send(tReadDone, 0, u64(uint64(le.Uint32(b)), descriptor(b[8:]).Len)...)
			within(t, w)
		}
		w := goWrite(s, pattern(100_000))
		p.expect(tAskInbox)
		s.Abort()
		<-w
	})
}

// All parts of a Write go the same way, even if the answer of PaysToOffer would change meanwhile.
func TestAWriteIsDecidedOnce(t *testing.T) {
	cfg := buffered
	cfg.Limits.MaxExpose = 100_000
	inBubble(t, func(t *testing.T) {
		asked := &countedPays{}
		s, _, p := negotiatedOn(t, cfg, session.Config{KeepAlive: -1}, withMemory(func(m session.Memory) session.Memory {
			asked.Memory = m
			return asked
		}))
		w := goWrite(s, pattern(300_000))
		for range 3 {
			b := p.expect(tOfferRead)
			p.send(tReadDone, 0, u64(uint64(le.Uint32(b)), descriptor(b[8:]).Len)...)
		}
		if r := within(t, w); r.n != 300_000 || r.err != nil {
			t.Errorf("Write: %+v", r)
		}
		if n := asked.n.Load(); n != 1 {
			t.Errorf("its memory was looked at %d times", n)
		}
	})
}

// Writes whose memory was expensive to expose are offered once it has become cheap, in the same session.
func TestDearWritesBecomeCheap(t *testing.T) {
	dear := buffered
	dear.OfferFrom = 1 << 20
	inBubble(t, func(t *testing.T) {
		s, a, p := negotiated(t, dear, session.Config{KeepAlive: -1})
		in := p.open(s, 1<<20)
		data := pattern(100_000)
		writeAll(t, s, data, len(data))
		if got, _ := in.read(len(data)); !bytes.Equal(got, data) {
			t.Error("wrong bytes")
		}
		in.emptied()
		a.SetOfferFrom(0)
		w := goWrite(s, data)
		p.expect(tOfferRead)
		s.Abort()
		<-w
	})
}

// If the peer has no memory for an inbox, bytes go in messages, and another AskInbox is sent later. They
// also go in messages if this end has no memory for the send buffer.
func TestWithoutAnInboxBytesGoAsMessages(t *testing.T) {
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
		s, _, p := negotiated(t, buffered, session.Config{KeepAlive: -1})
		const skipShort = 32
		for range 3 {
			write(t, s, p, true)
			p.send(tInbox, 0, u64(0, 0, 0, 0)...)
			pass(time.Second)
			for range skipShort {
				write(t, s, p, false)
			}
		}
		if n := s.Stats().NoBox; n != 3 {
			t.Errorf("there was no send buffer %d times, want 3", n)
		}
	})
	inBubble(t, func(t *testing.T) {
		poor := buffered
		poor.Faults.Alloc = 1
		s, _, p := negotiated(t, poor, session.Config{KeepAlive: -1})
		p.open(s, 100_000)
		w := goWrite(s, pattern(10_000))
		p.expect(tLeaveInbox)
		p.data(10_000)
		within(t, w)
		if n := s.Stats().NoBox; n != 1 {
			t.Errorf("there was no send buffer %d times, want once", n)
		}
	})
}

// The inbox is not left while a Write allocates the send buffer for it.
func TestTheInboxWaitsForALateSendBuffer(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiatedOn(t, buffered, session.Config{}, withMemory(inThreeSeconds))
		in := p.open(s, 100_000)
		data := pattern(20_000)
		writeAll(t, s, data, len(data))
		if got, _ := in.read(len(data)); !bytes.Equal(got, data) {
			t.Error("wrong bytes")
		}
	})
}

// A send buffer that is allocated when the session has ended is given back.
func TestASendBufferMayComeBehindAbort(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		mem := &slowAlloc{}
		s, e, p := negotiatedOn(t, buffered, session.Config{}, withMemory(func(m session.Memory) session.Memory {
			mem.Memory = m
			return mem
		}))
		aborted := make(chan struct{})
		mem.then = func() {
			go func() { s.Abort(); close(aborted) }()
			for !e.Closed() {
				nap(latency)
			}
		}
		p.open(s, 100_000)
		w := goWrite(s, pattern(20_000))
		wantErr(t, "Write", within(t, w).err, session.ErrClosed)
		<-aborted
		<-s.Closed()
		if left := e.Left(); left.Allocated != 0 {
			t.Errorf("kept: %+v", left)
		}
	})
}

// If a send buffer cannot be registered any more, what Writes have left there goes as payload, at its
// place in the stream. For a long time later Writes do so as well, except for large ones whose memory is
// worth offering.
func TestAnUnregisteredSendBufferGoesAsPayload(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, writes, p := failing(t)
		in := p.open(s, 30_000)
		data := pattern(60_000)
		writeAll(t, s, data[:40_000], 10_000) // by RDMA, and the rest waits for room
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
			size := 10_000
			if rounds%8 == 1 {
				size = 100_000
			}
			w := goWrite(s, pattern(size))
			for n := 0; n < size; {
				switch m := p.recv(); m[0] {
				case tData:
					n += len(m) - header
					p.send(tCredit, 0)
				case tAskInbox:
					asked = true
				case tOfferRead:
					t.Fatalf("Write %d, of %d bytes, is offered", rounds, size)
				}
			}
			within(t, w)
		}
		if rounds < 1000 || rounds == 2000 {
			t.Errorf("asked for another after %d Writes", rounds)
		}
	})
}

// A stream that never pauses gives up a send buffer that is of no use.
func TestAStreamLeavesAUselessSendBuffer(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, writes, p := failing(t)
		in := p.open(s, 100_000)
		go func() {
			for {
				if _, err := s.Write(pattern(10_000)); err != nil {
					return // the test has ended
				}
			}
		}()
		pass(time.Second / 2) // the send buffer and the inbox are full
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

// A connection that does nothing gives back both buffers once everything was read, and gets others when
// it is used again.
func TestAnIdleConnectionGivesItsBuffersBack(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, b, ea, eb := pair(t, buffered, session.Config{})
		data := pattern(50_000)
		writeAll(t, a, data, 10_000) // requests an inbox, while the bytes go in messages
		readFull(t, b, len(data))
		for range 3 {
			writeAll(t, a, data, 10_000)
			pass(time.Second / 2)
			if eb.Left().Exposed != 1 || ea.Left().Allocated == 0 {
				t.Fatal("there is no inbox, or no sendBuffer")
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
			writeAll(t, a, data, 10_000) // requests an inbox again
			readFull(t, b, len(data))
		}
	})
}

// Buffers are also given back if the connection was idle twice within the second after which that is
// done, and if a Read waits at an end: then nothing polls any more.
func TestAConnectionThatWasIdleTwiceGivesItsBuffersBack(t *testing.T) {
	for name, waits := range map[string][2]bool{
		"nobody waits": {}, "the writer reads": {0: true}, "the reader reads": {1: true}, "both read": {true, true},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				a, b, ea, eb := pair(t, buffered, session.Config{KeepAlive: -1})
				data := pattern(50_000)
				for range 3 { // within the second; the first time requests the inbox
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
					t.Fatal("there is no sendBuffer")
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

// The send buffer is not given back while the device reads from it.
func TestTheSendBufferOfAWriteUnderWayIsKept(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, e, p := negotiated(t, buffered, session.Config{})
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

// A send buffer that finds the queue full of RDMA reads waits until one has completed.
func TestTheSendBufferWaitsBehindRDMAReads(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		narrow := buffered
		narrow.RDMAQueue = 1
		s, e, p := negotiated(t, narrow, session.Config{})
		in := p.open(s, 100_000)
		theirs, ours, into := pattern(200_000), pattern(20_000), make([]byte, 200_000)
		d, err := p.Expose(theirs, session.RemoteRead)
		if err != nil {
			t.Fatal(err)
		}
		r := goRead(s, into)
		e.Hold(twin.HoldReads)
		p.send(tOfferRead, 0, u64(1, d.Addr, d.Key, d.Len)...)
		pass(3 * latency)
		writeAll(t, s, ours, len(ours))
		before := e.Calls()
		pass(10 * time.Second)
		if n := e.Calls() - before; n > 100 {
			t.Errorf("%d calls during 10 seconds", n)
		}
		e.Hold(0)
		if got, _ := in.read(len(ours)); !bytes.Equal(got, ours) {
			t.Error("wrong bytes")
		}
		if x := within(t, r); x.n != len(theirs) || x.err != nil {
			t.Errorf("Read: %+v", x)
		}
	})
}

// An inbox that comes after its Write, on a connection that only a waiting Read polls, is left.
func TestAnUnusedInboxIsLeft(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, buffered, session.Config{KeepAlive: -1})
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

// An inbox that is of no use is left only once, even if the buffers of the idle connection are about to
// be given back: a second LeaveInbox would violate the protocol.
func TestAnInboxIsLeftOnce(t *testing.T) {
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
			a, b, ea, _ := pair(t, buffered, session.Config{})
			hear(t, b)
			writeAll(t, a, pattern(size), size) // requests an inbox; goes in messages
			pass(20 * time.Millisecond)         // the inbox has come and is not used: it is due to be left later
			var all [][]byte
			for n := 1 << 20; n >= 1<<10; n /= 2 {
				for m := ea.Memory().Alloc(n); m != nil; m = ea.Memory().Alloc(n) {
					all = append(all, m)
				}
			}
			if len(all) == 0 {
				t.Fatal("nothing was allocated")
			}
			writeAll(t, a, pattern(size), size) // no memory for the send buffer: leaves the inbox
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
			a, b, _, _ := pair(t, buffered, session.Config{SendBudget: 4 << 10})
			hear(t, b)
			for range 40 {
				writeAll(t, a, pattern(size), size)
				pass(100 * time.Millisecond)
			}
			b.Close()
		})
	})
}

// An Emptied may cross LeaveInbox.
func TestEmptiedMayCrossLeaveInbox(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, buffered, session.Config{})
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

// Nothing of an inbox that was left counts for the next one: neither an Emptied that has crossed
// LeaveInbox, nor what was read from the old one.
func TestTheNextInboxBeginsEmpty(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, buffered, session.Config{KeepAlive: -1})
		in := p.open(s, 50_000)
		writeAll(t, s, pattern(20_000), 20_000)
		in.read(20_000)
		in.emptied()
		pass(5 * time.Second)
		p.expect(tLeaveInbox)
		p.asked(s)
		in.emptied()
		pass(time.Second)
		next := p.give(50_000)
		data := pattern(60_000)
		w := goWrite(s, data)
		got, _ := next.read(50_000)
		if m := p.recv(); m != nil {
			t.Errorf("a message of type %d, and the inbox is full", m[0])
		}
		next.emptied()
		rest, _ := next.read(10_000)
		if x := within(t, w); x.n != len(data) || x.err != nil || !bytes.Equal(append(got, rest...), data) {
			t.Errorf("Write: %+v, or wrong bytes", x)
		}
	})
}

// A send buffer that cannot be registered any more is kept until everything in it is sent. Later Writes
// follow it.
func TestAnUnregisteredSendBufferIsSentFirst(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, writes, p := failing(t)
		in := p.open(s, 30_000)
		data := pattern(310_000)
		writeAll(t, s, data[:300_000], 10_000) // there is not enough credit for most of it
		writes.fail.Store(true)
		got, _ := in.read(30_000)
		in.emptied()
		pass(time.Second)
		w := goWrite(s, data[300_000:])
		pass(time.Second)
		for len(got) < len(data) {
			switch m := p.recv(); {
			case m == nil:
				t.Fatalf("nothing behind %d bytes", len(got))
			case m[0] == tData:
				got = append(got, m[header:]...)
				p.send(tCredit, 0)
			}
		}
		if x := within(t, w); x.err != nil || !bytes.Equal(got, data) {
			t.Errorf("Write: %+v, or wrong bytes", x)
		}
	})
}

// A stream that always has RDMA writes in flight does not keep records of those that have completed.
func TestCompletedWritesAreForgotten(t *testing.T) {
	const underWay, times = 30, 100_000
	if kept := session.LengthsKept(t, underWay, times); kept > 2*underWay+1 {
		t.Errorf("%d lengths are kept, with %d writes under way", kept, underWay)
	}
}

// A small Write that finds no credit opens the send buffer, so that the Writes after it do not wait.
func TestSmallWritesWithoutCreditGoThroughTheSendBuffer(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		cfg := buffered
		cfg.Limits.InboxAfter = 1 << 20
		s, _, p := negotiated(t, cfg, session.Config{})
		data := pattern(40_000)
		write := func(n int) (written int) {
			for written < n {
				w := goWrite(s, data[:100])
				pass(time.Millisecond)
				select {
				case r := <-w:
					written += r.n
				default:
					t.Fatalf("a Write waits behind %d bytes", written)
				}
				data = data[100:]
			}
			return written
		}
		all := bytes.Clone(data)
		sent := write(100 * (cfg.Limits.Window - 2*session.ControlReserve - 1)) // Negotiate used one
		stuck := goWrite(s, data[:100])
		waits(t, "a Write without credit", stuck)
		sent, data = sent+100, data[100:]
		var got []byte
		for m := p.recv(); m[0] != tAskInbox; m = p.recv() {
			got = append(got, m[header:]...)
		}
		in := &rawInbox{p: p, mem: make([]byte, 50_000)}
		d, err := p.Expose(in.mem, session.RemoteWrite)
		if err != nil {
			t.Fatal(err)
		}
		held := p.dropped
		p.dropped = 0 // without credit so far
		p.send(tInbox, 0, u64(0, d.Addr, d.Key, d.Len)...)
		within(t, stuck)
		sent += write(10_000)
		p.dropped = held
		p.send(tCredit, 0)
		rest, fills := in.read(sent - len(got))
		if !bytes.Equal(append(got, rest...), all[:sent]) || fills > 2 {
			t.Errorf("%d bytes in messages, %d in %d Fills, or wrong ones", len(got), len(rest), fills)
		}
	})
}

// What is in the send buffer is sent while a Read copies a long offer in one look.
func TestTheSendBufferGoesOnBesideALongRead(t *testing.T) {
	for name, tt := range map[string]struct {
		inbox, size int
		emptied     bool
	}{
		"the inbox was full": {30_000, 40_000, true},
		"the queue was full": {200_000, 120_000, false},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				cfg := buffered
				cfg.OfferFrom = 1 << 30 // it does not pay to read into a Read's slice
				e := new(slowLooks)
				s, _, p := negotiatedOn(t, cfg, session.Config{}, func(inner *twin.Endpoint) session.Endpoint {
					e.Endpoint = inner
					return e
				})
				in := p.open(s, tt.inbox)
				large := make([]byte, 16<<20)
				d, err := p.Expose(large, session.RemoteRead)
				if err != nil {
					t.Fatal(err)
				}
				r := goRead(s, make([]byte, len(large)))
				waits(t, "Read", r)
				e.on.Store(true)
				defer within(t, r) // the look sleeps, and time would not pass while this goroutine waited for its lock
				p.send(tOfferRead, 0, u64(1, d.Addr, d.Key, d.Len)...)
				nap(time.Millisecond)
				writeAll(t, s, pattern(tt.size), 10_000)
				if tt.emptied {
					in.read(tt.inbox)
					in.emptied()
					in.read(tt.size - tt.inbox)
				} else {
					in.read(tt.size)
				}
				if len(r) > 0 {
					t.Error("it waited for the Read")
				}
			})
		})
	}
}
