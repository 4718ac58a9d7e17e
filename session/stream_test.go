package session_test

import (
	"bytes"
	"testing"
	"time"

	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/session"
)

// Two peers that both write before they read do not deadlock if they would not on TCP. Without memory
// for a send buffer, only the credits for messages bound what they can write.
func TestBothEndsMayWriteFirst(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		size := 200_000
		if l := cfg.Limits; !l.Ring() && l.Inbox == 0 {
			size = (l.Window - 2*session.ControlReserve - 1) * (l.MaxMessage - header)
		}
		cfg.QueueBytes = size + 64<<10 // a ring takes the place of a socket's buffer
		a, b, _, _ := pair(t, cfg, session.Config{})
		data := pattern(size)
		wa, wb := goWrite(a, data), goWrite(b, data)
		for _, w := range []<-chan result{wa, wb} {
			if r := within(t, w); r.n != size || r.err != nil {
				t.Fatalf("Write: %+v", r)
			}
		}
		for _, s := range []*session.Session{a, b} {
			if got := readFull(t, s, size); !bytes.Equal(got, data) {
				t.Error("wrong bytes")
			}
		}
	})
}

// While the peer does not read, Write takes what the budgets allow, and then waits, however much there
// is to write.
func TestBudgetsBoundMemory(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		cfg.AllocBudget = 1 << 30
		a, b, _, eb := pair(t, cfg, session.Config{ReceiveBudget: 100_000, SendBudget: 50_000})
		data := pattern(4 << 20)
		w := goWrite(a, data)
		pass(time.Minute)
		select {
		case r := <-w:
			t.Fatalf("Write ended though nobody reads: %+v", r)
		default:
		}
		if got := eb.Left().Allocated; got > 100_000+16<<10 {
			t.Errorf("the receiver holds %d bytes with a budget of 100000", got)
		}
		if got := readFull(t, b, len(data)); !bytes.Equal(got, data) {
			t.Error("wrong bytes")
		}
		if r := within(t, w); r.n != len(data) || r.err != nil {
			t.Errorf("Write: %+v", r)
		}
	})
}

// The bytes of concurrent Writes do not mix.
func TestConcurrentWritesDoNotMix(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		const writers, size = 8, 30_000
		a, b, _, _ := pair(t, cfg, session.Config{})
		for i := range writers {
			go a.Write(bytes.Repeat([]byte{byte(i)}, size))
		}
		got := readFull(t, b, writers*size)
		for i := range writers {
			part := got[i*size:][:size]
			if changed(part, part[0]) >= 0 {
				t.Errorf("bytes of several Writes in one")
			}
		}
	})
}

// WriteBuffers is one Write: its slices go in order, and small ones share messages.
func TestWriteBuffersIsOneWrite(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		a, b, _, _ := pair(t, cfg, session.Config{})
		data := pattern(120_000)
		var v [][]byte
		for rest := data; len(rest) > 0; {
			n := min(len(rest), 1+len(v)*len(v)%20_000)
			v, rest = append(v, rest[:n]), rest[n:]
		}
		v = append(v, nil, []byte{})
		want := len(v)
		done := make(chan result, 1)
		go func() { n, err := a.WriteBuffers(v); done <- result{int(n), err} }()
		if got := readFull(t, b, len(data)); !bytes.Equal(got, data) {
			t.Error("wrong bytes")
		}
		if r := within(t, done); r.n != len(data) || r.err != nil {
			t.Errorf("WriteBuffers: %+v", r)
		}
		if len(v) != want {
			t.Error("WriteBuffers changed its argument")
		}
		before := a.Stats().MessagesSent
		small := bytes.SplitAfter(bytes.Repeat([]byte("x "), 100), []byte(" "))
		if _, err := a.WriteBuffers(small); err != nil {
			t.Fatal(err)
		}
		if sent := a.Stats().MessagesSent - before; sent > 2 {
			t.Errorf("%d messages for 100 small slices", sent)
		}
	})
}

// Reads and Writes of no bytes do not wait.
func TestEmptySlicesDoNotWait(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, _, _, _ := pair(t, messages, session.Config{})
		if r := within(t, goRead(a, nil)); r.n != 0 || r.err != nil {
			t.Errorf("Read: %+v", r)
		}
		if r := within(t, goWrite(a, nil)); r.n != 0 || r.err != nil {
			t.Errorf("Write: %+v", r)
		}
	})
}

// Bytes that wait for room go through the send buffer as soon as there is one.
func TestWhatWaitsGoesThroughTheSendBuffer(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		e := &narrow{}
		s, _, p := negotiatedOn(t, buffered, session.Config{}, func(under *twin.Endpoint) session.Endpoint {
			e.Endpoint = under
			return e
		})
		in := p.open(s, 100_000)
		e.most.Store(1500)
		data := pattern(5100)
		writeAll(t, s, data[:5000], 5000) // waits at this end
		writeAll(t, s, data[5000:], 100)  // is by itself no reason for a send buffer, but that something waits is one
		got, fills := in.read(5000)
		if got = append(got, p.data(100)...); !bytes.Equal(got, data) || fills != 1 {
			t.Errorf("right bytes: %v, %d Fills", bytes.Equal(got, data), fills)
		}
	})
}

// A Read that has bytes does not poll again after a message that the endpoint has marked as the last
// one.
func TestReadStopsPollingAtTheLastMessage(t *testing.T) {
	for _, last := range []bool{false, true} {
		inBubble(t, func(t *testing.T) {
			ea, eb := twins(t, messages)
			c := &counted{Endpoint: eb, last: last}
			a, b := session.New(ea, session.Config{}), session.New(c, session.Config{})
			defer idle()
			defer a.Abort()
			defer b.Abort()
			negotiate(t, a)
			negotiate(t, b)
			if _, err := a.Write([]byte("one")); err != nil {
				t.Fatal(err)
			}
			pass(2 * latency)
			before := c.looks
			p := make([]byte, 100)
			if n, err := b.Read(p); n != 3 || err != nil {
				t.Fatalf("%q, %v", p[:n], err)
			}
			want := 2
			if last {
				want = 1
			}
			if got := c.looks - before; got != want {
				t.Errorf("Last is %v: %d looks, want %d", last, got, want)
			}
		})
	}
}

// A Write that stops waiting leaves the wake-up of a waiting Read armed: bytes that come are read at
// once, not only at another goroutine's next poll.
func TestWaitingDirectionsAreIndependent(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		a, b, _, _ := pair(t, cfg, session.Config{ReceiveBudget: 1, SendBudget: 1})
		r, w := goRead(a, make([]byte, 10)), goWrite(a, pattern(1<<20))
		pass(time.Second)
		a.InterruptWrite(true)
		within(t, w)
		began := time.Now()
		if _, err := b.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		if x := within(t, r); x.n != 1 || x.err != nil {
			t.Errorf("Read: %+v", x)
		}
		if took := time.Since(began); took > 2*latency {
			t.Errorf("it took %v, with a latency of %v", took, latency)
		}
	})
}
