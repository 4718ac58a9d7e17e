package session_test

import (
	"bytes"
	"fmt"
	"io"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/session"
)

// lend writes data through Reserve and Commit, up to most bytes at a time.
func lend(t *testing.T, s *session.Session, data []byte, most int) {
	t.Helper()
	for len(data) > 0 {
		room, err := s.Reserve(min(most, len(data)))
		if err != nil {
			t.Fatalf("Reserve with %d bytes to go: %v", len(data), err)
		}
		n := copy(room, data)
		if n != len(room) {
			t.Fatalf("Reserve of %d bytes lends %d", min(most, len(data)), len(room))
		}
		if err := s.Commit(n); err != nil {
			t.Fatalf("Commit with %d bytes to go: %v", len(data), err)
		}
		data = data[n:]
	}
}

// peeked reads n bytes through Peek and Discard, up to most at a time.
func peeked(t *testing.T, s *session.Session, n, most int) (got []byte) {
	t.Helper()
	for len(got) < n {
		b, err := s.Peek()
		if err != nil || len(b) == 0 {
			t.Fatalf("Peek after %d bytes of %d: %d bytes, %v", len(got), n, len(b), err)
		}
		b = b[:min(most, len(b), n-len(got))]
		got = append(got, b...)
		if err := s.Discard(len(b)); err != nil {
			t.Fatalf("Discard after %d bytes of %d: %v", len(got), n, err)
		}
	}
	return got
}

// Bytes that were written or read in lent memory are part of the stream, between those of Write and
// Read, and are counted.
func TestLentBytesAreOfTheStream(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		a, b, _, _ := pair(t, cfg, session.Config{})
		data := pattern(400_000)
		written := make(chan struct{})
		go func() {
			defer close(written)
			for at, size := 0, 1; at < len(data); size = 1 + size*7%100_000 {
				part := data[at:min(at+size, len(data))]
				if at%2 == 0 {
					lend(t, a, part, 30_000)
				} else {
					a.Write(part)
				}
				at += len(part)
			}
			a.CloseWrite()
		}()
		var got []byte
		for size := 1; len(got) < len(data); size = 1 + size*5%20_000 {
			n := min(size, len(data)-len(got))
			if len(got)%2 == 0 {
				got = append(got, peeked(t, b, n, 10_000)...)
			} else {
				got = append(got, readFull(t, b, n)...)
			}
		}
		if !bytes.Equal(got, data) {
			t.Error("wrong bytes")
		}
		if _, err := b.Peek(); err != io.EOF {
			t.Errorf("Peek at the end: %v", err)
		}
		<-written
		out, in := a.Stats(), b.Stats()
		if out.BytesSent != uint64(len(data)) || out.LentBytesSent == 0 || out.LentBytesSent >= out.BytesSent {
			t.Errorf("sent %d bytes, %d of them lent", out.BytesSent, out.LentBytesSent)
		}
		if in.BytesReceived != uint64(len(data)) || in.LentBytesReceived == 0 || in.LentBytesReceived >= in.BytesReceived {
			t.Errorf("received %d bytes, %d of them lent", in.BytesReceived, in.LentBytesReceived)
		}
	})
}

// Commit and Discard without a loan, or of more than was lent, are errors. They send or take nothing,
// and end the loan.
func TestALoanIsNoLargerThanItself(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		a, b, _, _ := pair(t, cfg, session.Config{})
		wantErr(t, "Commit of nothing", a.Commit(0), session.ErrNotReserved)
		wantErr(t, "Discard of nothing", b.Discard(1), session.ErrNotReserved)
		if err := b.Discard(0); err != nil {
			t.Errorf("Discard(0) of nothing: %v", err)
		}
		for _, n := range []int{-1, 101} {
			room, err := a.Reserve(100)
			if err != nil || len(room) != 100 || cap(room) != 100 {
				t.Fatalf("Reserve: %d bytes, room for %d, %v", len(room), cap(room), err)
			}
			wantErr(t, "Commit of another size", a.Commit(n), session.ErrTooMuch)
			wantErr(t, "Commit behind it", a.Commit(0), session.ErrNotReserved)
		}
		lend(t, a, []byte("abc"), 3)
		for _, n := range []int{-1, 4} {
			if b, err := b.Peek(); string(b) != "abc" || cap(b) != 3 || err != nil {
				t.Fatalf("Peek: %q, room for %d, %v", b, cap(b), err)
			}
			wantErr(t, "Discard of another size", b.Discard(n), session.ErrTooMuch)
			wantErr(t, "Discard behind it", b.Discard(1), session.ErrNotReserved)
		}
		if got := readFull(t, b, 3); string(got) != "abc" {
			t.Errorf("read %q", got)
		}
	})
}

// While memory is lent for writing, a Write and another Reserve wait, but control messages do not.
func TestAWriteWaitsForTheEndOfALoan(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		a, b, _, _ := pair(t, cfg, session.Config{})
		for _, size := range []int{1, 2000, 20_000, 100_000} {
			if _, err := a.Reserve(10); err != nil {
				t.Fatal(err)
			}
			w := goWrite(a, pattern(size))
			if _, err := a.WriteUrgent([]byte("!")); err != nil {
				t.Error(err)
			}
			pass(time.Second)
			select {
			case r := <-w:
				t.Fatalf("a Write of %d during a loan: %+v", size, r)
			case <-b.Urgent():
			default:
				t.Error("urgent data waits for the end of a loan")
			}
			r := goRead(b, make([]byte, 1))
			pass(time.Second)
			if err := a.Commit(0); err != nil {
				t.Fatal(err)
			}
			within(t, r)
			readFull(t, b, size-1)
			within(t, w)
		}
	})
}

// While bytes are lent for reading, a Read waits, another Peek lends the same bytes, and messages that
// come are acted on at once.
func TestAReadWaitsForTheEndOfALoan(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, messages, session.Config{})
		p.send(tData, 0, []byte("abc")...)
		first, err := s.Peek()
		if err != nil {
			t.Fatal(err)
		}
		r := goRead(s, make([]byte, 10))
		pass(2 * latency)
		began := time.Now()
		p.send(tPing, 0)
		p.expect(tPong)
		if took := time.Since(began); took > time.Millisecond {
			t.Errorf("a Read that waits for a loan answers after %v", took)
		}
		s.InterruptRead(true)
		wantErr(t, "Read", within(t, r).err, session.ErrInterrupted)
		s.InterruptRead(false)
		if again, err := s.Peek(); err != nil || &again[0] != &first[0] || len(again) != 3 {
			t.Errorf("Peek again: %q, %v", again, err)
		}
		r = goRead(s, make([]byte, 10))
		pass(time.Second)
		if err := s.Discard(1); err != nil {
			t.Fatal(err)
		}
		if x := within(t, r); x.n != 2 || x.err != nil {
			t.Errorf("Read of the rest: %+v", x)
		}
	})
}

// Lent bytes do not change while this end closes or aborts and the peer goes on writing.
func TestLentBytesStayThoughThisEndCloses(t *testing.T) {
	ends := map[string]func(*session.Session) error{
		"Close": (*session.Session).Close,
		"Abort": func(s *session.Session) error { s.Abort(); return nil },
	}
	for name, end := range ends {
		t.Run(name, func(t *testing.T) {
			each(t, func(t *testing.T, cfg twin.Config) {
				a, b, _, _ := pair(t, cfg, session.Config{SendBudget: 64 << 10, ReceiveBudget: 64 << 10})
				for range 4 { // the second time there may be an inbox
					writeAll(t, a, pattern(20_000), 20_000)
					readFull(t, b, 20_000)
				}
				writeAll(t, a, pattern(20_000), 20_000)
				pass(time.Second)
				lent, err := b.Peek()
				if err != nil {
					t.Fatal(err)
				}
				was := bytes.Clone(lent)
				ended := make(chan error, 1)
				go func() { ended <- end(b) }()
				go func() {
					for err := error(nil); err == nil; {
						_, err = a.Write(make([]byte, 20_000))
						nap(latency)
					}
				}()
				pass(5 * time.Second)
				if !bytes.Equal(lent, was) {
					t.Errorf("%d bytes that are lent have changed", len(lent))
				}
				if err := b.Discard(len(lent)); err != nil {
					t.Errorf("Discard of all: %v", err)
				}
				if err := <-ended; err != nil {
					t.Error(err)
				}
				a.Abort()
			})
		})
	}
}

// A session that has ended keeps lent room until the end of the loan. Its bytes are not sent any more.
func TestClosedWaitsForTheEndOfALoan(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		a, b, ea, _ := pair(t, cfg, session.Config{})
		room, err := a.Reserve(100)
		if err != nil {
			t.Fatal(err)
		}
		if err := a.Close(); err != nil {
			t.Error(err)
		}
		pass(time.Minute)
		select {
		case <-a.Closed():
			t.Fatal("the session is gone though it has lent memory")
		default:
		}
		if !ea.Closed() || ea.Retired() {
			t.Errorf("endpoint closed: %v, retired: %v", ea.Closed(), ea.Retired())
		}
		fill(room, 1)
		wantErr(t, "Commit", a.Commit(len(room)), session.ErrClosed)
		<-a.Closed()
		_, err = a.Reserve(1)
		wantErr(t, "Reserve", err, session.ErrClosed)
		_, err = a.Peek()
		wantErr(t, "Peek", err, session.ErrClosed)
		if n, err := b.Read(make([]byte, 1)); n != 0 || err != io.EOF {
			t.Errorf("the peer reads %d, %v", n, err)
		}
	})
}

// If the connection, or this direction, ends during a loan, Commit sends nothing and returns why.
func TestALoanThatCannotBeSent(t *testing.T) {
	cases := map[string]struct {
		end  func(a, b *session.Session, eb *twin.Endpoint)
		want error
	}{
		"CloseWrite": {func(a, b *session.Session, eb *twin.Endpoint) { a.CloseWrite() }, session.ErrClosed},
		"Abort":      {func(a, b *session.Session, eb *twin.Endpoint) { a.Abort() }, session.ErrClosed},
		"of peer":    {func(a, b *session.Session, eb *twin.Endpoint) { b.Abort() }, syscall.ECONNRESET},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			each(t, func(t *testing.T, cfg twin.Config) {
				a, b, _, eb := pair(t, cfg, session.Config{})
				if _, err := a.Reserve(100); err != nil {
					t.Fatal(err)
				}
				c.end(a, b, eb)
				pass(time.Second)
				wantErr(t, "Commit", a.Commit(100), c.want)
				wantErr(t, "Commit once more", a.Commit(100), session.ErrNotReserved)
			})
		})
	}
}

// Reserve and Peek are interrupted as Write and Read are.
func TestReserveAndPeekAreInterrupted(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		a, b, _, _ := pair(t, cfg, session.Config{ReceiveBudget: 1, SendBudget: 10_000})
		reserved, peeked := make(chan error, 1), make(chan error, 1)
		go func() {
			for {
				room, err := a.Reserve(5000)
				if err == nil {
					err = a.Commit(len(room))
				}
				if err != nil {
					reserved <- err
					return
				}
			}
		}()
		go func() { _, err := a.Peek(); peeked <- err }()
		pass(time.Second)
		a.InterruptWrite(true)
		wantErr(t, "Reserve", <-reserved, session.ErrInterrupted)
		a.InterruptWrite(false)
		a.InterruptRead(true)
		wantErr(t, "Peek", <-peeked, session.ErrInterrupted)
		a.InterruptRead(false)
		b.Write([]byte("x"))
		if b, err := a.Peek(); string(b) != "x" || err != nil {
			t.Errorf("Peek: %q, %v", b, err)
		}
		a.Discard(1)
	})
}

// A loan that is available at once does not count as a wait that polling has ended.
func TestALoanWithoutAWaitIsNoPoll(t *testing.T) {
	a, b, _, _ := pair(t, ring, session.Config{Spin: 20 * time.Microsecond})
	const loans = 10
	before := a.Stats().Polls
	for i := range byte(loans) {
		lend(t, a, []byte("abc"), 3)
		if _, err := a.WriteUrgent([]byte{i}); err != nil {
			t.Fatal(err)
		}
	}
	if polls := a.Stats().Polls - before; polls != 0 {
		t.Errorf("%d waits are counted", polls)
	}
	testenv.Eventually(t, time.Minute, func() error { // until all of it has come
		var last [1]byte
		if _, err := b.ReadUrgent(last[:]); err != nil || last[0] != loans-1 {
			return fmt.Errorf("urgent: %d, %v", last[0], err)
		}
		return nil
	})
	before = b.Stats().Polls
	for range loans {
		peeked(t, b, 2, 2)
	}
	if polls := b.Stats().Polls - before; polls > 0 {
		t.Errorf("%d waits are counted", polls)
	}
}
