package session_test

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/session"
)

// peek lends bytes that have come or will come.
func peek(t *testing.T, s *session.Session) []byte {
	t.Helper()
	b, err := s.Peek()
	if err != nil || len(b) == 0 || cap(b) != len(b) {
		t.Fatalf("Peek: %d of %d bytes, %v", len(b), cap(b), err)
	}
	t.Cleanup(func() { s.Discard(0) }) // for a test that has failed
	return b
}

// readLent reads n bytes in lent memory.
func readLent(t *testing.T, s *session.Session, n int) (got []byte) {
	t.Helper()
	for len(got) < n {
		b := peek(t, s)
		b = b[:min(len(b), n-len(got))]
		got = append(got, b...)
		if err := s.Discard(len(b)); err != nil {
			t.Fatalf("Discard(%d): %v", len(b), err)
		}
	}
	return got
}

func goPeek(s *session.Session) <-chan result {
	c := make(chan result, 1)
	go func() { b, err := s.Peek(); c <- result{len(b), err} }()
	return c
}

// Peek and Discard return the same stream as Read, whichever way it came and however much of a piece is
// discarded.
func TestPeekedBytesAreTheStream(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		a, b, _, _ := pair(t, inPieces(cfg), session.Config{ReceiveBudget: 100_000})
		data := pattern(2_000_000)
		go func() {
			r := rand.New(rand.NewPCG(1, 1))
			for rest := data; len(rest) > 0; {
				part := rest[:min(len(rest), int(duration(r, 1, 200_000)))]
				if w, err := a.Write(bytes.Clone(part)); err != nil {
					t.Error(w, err)
					break
				}
				rest = rest[len(part):]
			}
			a.CloseWrite()
		}()
		r := rand.New(rand.NewPCG(2, 2))
		var got []byte
		lent := uint64(0)
		for {
			if r.IntN(4) == 0 {
				p := make([]byte, duration(r, 1, 50_000))
				n, err := b.Read(p)
				if got = append(got, p[:n]...); err != nil {
					wantErr(t, "Read", err, io.EOF)
					break
				}
				continue
			}
			p, err := b.Peek()
			if err != nil {
				wantErr(t, "Peek", err, io.EOF)
				break
			}
			if r.IntN(10) == 0 {
				nap(time.Second)
			}
			if again := peek(t, b); &again[0] != &p[0] || len(again) != len(p) {
				t.Fatal("a second Peek lends something else")
			}
			n := len(p)
			if r.IntN(2) == 0 {
				n = r.IntN(n + 1)
			}
			got = append(got, p[:n]...)
			lent += uint64(n)
			if err := b.Discard(n); err != nil {
				t.Fatal(err)
			}
		}
		if !bytes.Equal(got, data) {
			t.Errorf("%d bytes of %d, or wrong ones", len(got), len(data))
		}
		if st := b.Stats(); st.LentBytesReceived != lent || st.BytesReceived != uint64(len(data)) {
			t.Errorf("lent %d of %d bytes, and counted %d of %d", lent, len(data), st.LentBytesReceived, st.BytesReceived)
		}
		_, err := b.Peek()
		wantErr(t, "Peek at the end", err, io.EOF)
	})
}

// A Read returns what was lent and not discarded.
func TestAReadGetsWhatWasNotDiscarded(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		a, b, _, _ := pair(t, cfg, session.Config{})
		writeAll(t, a, []byte("abcdef"), 6)
		if p := peek(t, b); string(p) != "abcdef" {
			t.Fatalf("%q", p)
		}
		if err := b.Discard(2); err != nil {
			t.Fatal(err)
		}
		if p := peek(t, b); string(p) != "cdef" {
			t.Errorf("%q behind two bytes", p)
		}
		if err := b.Discard(0); err != nil {
			t.Fatal(err)
		}
		if got := readFull(t, b, 2); string(got) != "cd" {
			t.Errorf("Read gets %q", got)
		}
		if p := peek(t, b); string(p) != "ef" {
			t.Errorf("%q of a message that a Read has begun", p)
		}
		b.Discard(2)
	})
}

// A wrong Discard takes nothing, and ends the loan.
func TestDiscardOfWhatWasNotLent(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		a, b, _, _ := pair(t, cfg, session.Config{})
		writeAll(t, a, []byte("abcdef"), 6)
		pass(time.Second)
		wantErr(t, "Discard without Peek", b.Discard(1), session.ErrNotReserved)
		wantErr(t, "Discard of fewer", b.Discard(-1), session.ErrNotReserved)
		wantErr(t, "Discard of nothing", b.Discard(0), nil)
		for _, n := range []int{-1, 7, 1 << 30} {
			peek(t, b)
			wantErr(t, "Discard of what was not lent", b.Discard(n), session.ErrTooMuch)
			wantErr(t, "Discard behind that", b.Discard(6), session.ErrNotReserved)
		}
		if got := readFull(t, b, 6); string(got) != "abcdef" {
			t.Errorf("Read gets %q", got)
		}
	})
}

// A Read during a loan waits, and then returns what follows the discarded bytes.
func TestAReadWaitsForDiscard(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		a, b, _, _ := pair(t, cfg, session.Config{})
		writeAll(t, a, []byte("abcdef"), 6)
		peek(t, b)
		p := make([]byte, 6)
		r := goRead(b, p)
		waits(t, "Read", r)
		b.InterruptRead(true)
		if r := within(t, r); r.n != 0 || !errors.Is(r.err, session.ErrInterrupted) {
			t.Errorf("behind its deadline: %+v", r)
		}
		b.InterruptRead(false)
		r = goRead(b, p)
		waits(t, "Read", r)
		b.Discard(2)
		if r := within(t, r); string(p[:r.n]) != "cdef" || r.err != nil {
			t.Errorf("%q, %v", p[:r.n], r.err)
		}
	})
}

// During a loan the peer is answered, whether or not a Read waits for the end of the loan: the peer does
// not find this end dead, and its Write waits only for room.
func TestThePeerIsAnsweredDuringALoan(t *testing.T) {
	for _, reads := range []bool{false, true} {
		each(t, func(t *testing.T, cfg twin.Config) {
			ea, eb := twins(t, cfg)
			a := session.New(ea, session.Config{KeepAlive: time.Second})
			b := session.New(eb, session.Config{KeepAlive: -1}) // keepalive would poll now and then
			t.Cleanup(func() {
				a.Abort()
				b.Abort()
				<-a.Closed()
				<-b.Closed()
				idle()
			})
			negotiate(t, a)
			negotiate(t, b)
			writeAll(t, a, []byte("abcdef"), 6)
			lent := peek(t, b)
			p := make([]byte, 6)
			var r <-chan result
			if reads {
				r = goRead(b, p)
				waits(t, "Read", r)
			}
			nap(time.Minute)
			if n, err := a.Write([]byte("g")); n != 1 || err != nil {
				t.Fatalf("after a minute the peer writes %d, %v", n, err)
			}
			if string(lent) != "abcdef" {
				t.Errorf("%q is lent", lent)
			}
			b.Discard(6)
			if !reads {
				r = goRead(b, p)
			}
			if r := within(t, r); string(p[:r.n]) != "g" || r.err != nil {
				t.Errorf("%q, %v", p[:r.n], r.err)
			}
		})
	}
}

// During a loan the peer's offer is fetched ahead, as far as that goes without a Read.
func TestAnOfferIsTakenUpDuringALoan(t *testing.T) {
	for _, reads := range []bool{false, true} {
		each(t, func(t *testing.T, cfg twin.Config) {
			a, b, _, _ := pair(t, cfg, session.Config{})
			writeAll(t, a, []byte("a"), 1)
			peek(t, b)
			p := make([]byte, 50_000)
			var r <-chan result
			if reads {
				r = goRead(b, p)
				waits(t, "Read", r)
			}
			data := pattern(50_000)
			writeAll(t, a, data, len(data))
			if !reads {
				r = goRead(b, p)
			}
			waits(t, "Read", r)
			b.Discard(1)
			got := within(t, r)
			if rest := readFull(t, b, len(data)-got.n); !bytes.Equal(append(p[:got.n:got.n], rest...), data) {
				t.Error("wrong bytes")
			}
		})
	}
}

// A Peek that waits ends as a Read does.
func TestAPeekThatWaitsEnds(t *testing.T) {
	type ends struct {
		do   func(a, b *session.Session)
		want error
	}
	for name, end := range map[string]ends{
		"deadline":          {func(a, b *session.Session) { b.InterruptRead(true) }, session.ErrInterrupted},
		"Close":             {func(a, b *session.Session) { go b.Close() }, session.ErrClosed},
		"Abort":             {func(a, b *session.Session) { go b.Abort() }, session.ErrClosed},
		"peer's CloseWrite": {func(a, b *session.Session) { go a.CloseWrite() }, io.EOF},
		"peer's Close":      {func(a, b *session.Session) { go a.Close() }, io.EOF},
		"peer's Abort":      {func(a, b *session.Session) { go a.Abort() }, syscall.ECONNRESET},
	} {
		t.Run(name, func(t *testing.T) {
			each(t, func(t *testing.T, cfg twin.Config) {
				a, b, _, _ := pair(t, cfg, session.Config{})
				p := goPeek(b)
				waits(t, "Peek", p)
				end.do(a, b)
				if r := within(t, p); r.n != 0 || !errors.Is(r.err, end.want) {
					t.Errorf("%+v, want %v", r, end.want)
				}
			})
		})
	}
}

// readerEnds are the ways in which a connection ends for b, which reads.
var readerEnds = map[string]struct {
	do   func(a, b *session.Session, ea *twin.Endpoint)
	rest bool  // what was written before can still be read
	want error // what follows that; nil: any
}{
	"Close":             {func(a, b *session.Session, ea *twin.Endpoint) { b.Close() }, false, session.ErrClosed},
	"Abort":             {func(a, b *session.Session, ea *twin.Endpoint) { b.Abort() }, false, session.ErrClosed},
	"peer's CloseWrite": {func(a, b *session.Session, ea *twin.Endpoint) { a.CloseWrite() }, true, io.EOF},
	"peer's Close":      {func(a, b *session.Session, ea *twin.Endpoint) { a.Close() }, true, io.EOF},
	"peer's Abort":      {func(a, b *session.Session, ea *twin.Endpoint) { a.Abort() }, false, syscall.ECONNRESET},
	"peer's death":      {func(a, b *session.Session, ea *twin.Endpoint) { ea.Kill() }, false, nil},
}

// However a connection ends while bytes are lent, the call that ends it returns promptly, and the bytes
// stay in place until Discard. The rest follows them, and then the end, which is the same for Peek and
// Read.
func TestTheEndWhileBytesAreLent(t *testing.T) {
	for name, end := range readerEnds {
		for _, size := range []int{1000, 10_000, 60_000} { // a message, a send buffer, an offer
			t.Run(name, func(t *testing.T) {
				each(t, func(t *testing.T, cfg twin.Config) {
					a, b, ea, eb := pair(t, cfg, session.Config{KeepAlive: time.Second})
					data := pattern(3 * size)
					w := goWrites(a, data, size)
					skip := 0
					if size > 1000 {
						skip = 1100 // a Read has begun the offer, so that its message is not what is lent
						readFull(t, b, skip)
					}
					pass(time.Second)
					written := len(w) == 1 // all of it; a ring has no room for the largest size
					lent := peek(t, b)
					want := bytes.Clone(lent)
					if !bytes.Equal(lent, data[skip:skip+len(lent)]) {
						t.Fatal("wrong bytes")
					}
					began := time.Now()
					end.do(a, b, ea)
					if d := time.Since(began); d > 3*time.Second {
						t.Errorf("it took %v", d)
					}
					pass(5 * time.Second) // the peer of a session that is closed gives up after 10
					if !bytes.Equal(lent, want) || eb.Retired() || !isOpen(b) {
						t.Errorf("what is lent was touched, or given back: %v", eb.Retired())
					}
					if err := b.Discard(len(lent)); err != nil {
						t.Errorf("Discard: %v", err)
					}
					got, err := io.ReadAll(peekerOf{b})
					if err == nil {
						err = io.EOF
					}
					if rest := data[skip+len(lent):]; !bytes.HasPrefix(rest, got) || end.rest && written && len(got) < len(rest) {
						t.Errorf("%d bytes of %d behind them, or wrong ones", len(got), len(rest))
					}
					if end.want != nil && !errors.Is(err, end.want) {
						t.Errorf("then comes %v, want %v", err, end.want)
					}
					_, again := b.Read(make([]byte, 1))
					if again == nil || again.Error() != err.Error() {
						t.Errorf("Peek finds %v, and Read %v", err, again)
					}
				})
			})
		}
	}
}

// goWrites writes data in Writes of size bytes.
func goWrites(s *session.Session, data []byte, size int) <-chan result {
	c := make(chan result, 1)
	go func() {
		r := result{}
		for ; r.n < len(data) && r.err == nil; r.n += size {
			_, r.err = s.Write(bytes.Clone(data[r.n : r.n+size]))
		}
		c <- r
	}()
	return c
}

// peekerOf reads with Peek and Discard.
type peekerOf struct{ s *session.Session }

func (p peekerOf) Read(b []byte) (int, error) {
	from, err := p.s.Peek()
	if err != nil {
		return 0, err
	}
	n := copy(b, from)
	return n, p.s.Discard(n)
}

// After Close, the peer may not fill the lent part of the inbox again until the end of the loan.
func TestWhatIsLentOfTheInboxIsNotFilledAgain(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, buffered, session.Config{ReceiveBudget: 40_000})
		d := p.ask()
		data := pattern(40_000)
		p.fill(d, 0, data[:30_000])
		lent := peek(t, s)
		closed := make(chan error, 1)
		go func() { closed <- s.Close() }()
		pass(2 * latency)
		p.fill(d, 30_000, data[30_000:])
		pass(2 * latency)
		for m := p.recv(); m != nil; m = p.recv() {
			if m[0] == tEmptied {
				t.Errorf("%d bytes count as read during the loan of %d", le.Uint64(m[header+8:]), len(lent))
			}
		}
		if !bytes.Equal(lent, data[:len(lent)]) {
			t.Error("what is lent was touched")
		}
		if err := s.Discard(len(lent)); err != nil {
			t.Fatal(err)
		}
		for _, want := range []uint64{30_000, 40_000, 60_000} {
			if want == 60_000 {
				p.fill(d, 0, data[:20_000])
			}
			if n := le.Uint64(p.expect(tEmptied)[8:]); n != want {
				t.Errorf("%d bytes count as read, want %d", n, want)
			}
		}
		if err := <-closed; err != nil {
			t.Error(err)
		}
	})
}

// An inbox that the peer leaves while bytes of it are lent is given back at the end of the loan.
func TestAnInboxThatIsLeftWhileItIsLent(t *testing.T) {
	for _, ending := range []byte{tLeaveInbox, tClose, tAbort} {
		inBubble(t, func(t *testing.T) {
			s, e, p := negotiated(t, buffered, session.Config{ReceiveBudget: 40_000})
			d := p.ask()
			data := pattern(40_000)
			p.fill(d, 0, data[:20_000])
			lent := peek(t, s)
			p.send(ending, 0)
			pass(time.Second)
			if left := e.Left(); left.Allocated == 0 || left.Exposed != 1 {
				t.Errorf("given back: %+v", left)
			}
			if !bytes.Equal(lent, data[:20_000]) {
				t.Error("what is lent was touched")
			}
			s.Discard(len(lent))
			pass(time.Second)
			if left := e.Left(); left.Allocated != 0 || left.Exposed != 0 {
				t.Errorf("kept: %+v", left)
			}
		})
	}
}

// A Fill that wraps is lent in two pieces.
func TestAFillThatWrapsIsLentInPieces(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, buffered, session.Config{ReceiveBudget: 40_000})
		d := p.ask()
		data := pattern(70_000)
		p.fill(d, 0, data[:30_000])
		if got := readLent(t, s, 30_000); !bytes.Equal(got, data[:30_000]) {
			t.Error("wrong bytes")
		}
		if err := errors.Join(p.Write(data[30_000:40_000], d, 30_000, 1), p.Write(data[40_000:60_000], d, 0, 1)); err != nil {
			t.Fatal(err)
		}
		p.send(tFill, 0, u64(30_000)...)
		if b := peek(t, s); len(b) != 10_000 || !bytes.Equal(b, data[30_000:40_000]) {
			t.Errorf("%d bytes up to the end of the inbox, or wrong ones", len(b))
		}
		s.Discard(10_000)
		if b := peek(t, s); len(b) != 20_000 || !bytes.Equal(b, data[40_000:60_000]) {
			t.Errorf("%d bytes from its beginning, or wrong ones", len(b))
		}
		s.Discard(20_000)
	})
}

// The bytes in an offer's message are lent first, then the chunks that were fetched ahead.
func TestTheFirstPartOfAnOfferIsLent(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, b, _, _ := pair(t, byRead, session.Config{})
		data := pattern(600_000)
		w := goWrite(a, bytes.Clone(data))
		if first := peek(t, b); len(first) != offeredInline || !bytes.Equal(first, data[:len(first)]) {
			t.Errorf("%d bytes came with the offer, or wrong ones", len(first))
		}
		b.Discard(10)
		if got := readLent(t, b, len(data)-10); !bytes.Equal(got, data[10:]) {
			t.Error("wrong bytes")
		}
		if r := within(t, w); r.err != nil {
			t.Error(r)
		}
		if st := b.Stats(); st.OffersReceived != 1 || st.DirectBytesReceived != 0 || st.LentBytesReceived != uint64(len(data)) {
			t.Errorf("%+v", st)
		}
	})
}

// An exclusive loan waits for the end of any other one, and any other one waits for its end: no byte is
// lent twice at a time.
func TestExclusiveLoansWait(t *testing.T) {
	shared := func(s *session.Session) ([]byte, error) { return s.Peek() }
	exclusive := func(s *session.Session) ([]byte, error) { return s.PeekExclusive(true) }
	type peek func(*session.Session) ([]byte, error)
	for name, tt := range map[string]struct{ first, second peek }{
		"behind Peek": {shared, exclusive}, "before Peek": {exclusive, shared}, "both": {exclusive, exclusive},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				a, b, _, _ := pair(t, ring, session.Config{})
				writeAll(t, a, []byte("one"), 3)
				if got, err := tt.first(b); string(got) != "one" || err != nil {
					t.Fatalf("%q, %v", got, err)
				}
				second := make(chan string, 1)
				go func() {
					got, err := tt.second(b)
					if err != nil {
						t.Error(err)
					}
					second <- string(got)
				}()
				pass(time.Second)
				select {
				case got := <-second:
					t.Fatalf("%q is lent twice", got)
				default:
				}
				if err := b.Discard(3); err != nil {
					t.Fatal(err)
				}
				writeAll(t, a, []byte("two"), 3)
				if got := <-second; got != "two" {
					t.Errorf("%q is lent behind it", got)
				}
				if err := b.Discard(3); err != nil {
					t.Error(err)
				}
			})
		})
	}
}
