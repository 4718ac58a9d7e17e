package session_test

import (
	"bytes"
	"errors"
	"io"
	"math"
	"math/rand/v2"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/session"
)

// reserve lends room that has to be available at once.
func reserve(t *testing.T, s *session.Session, n int) []byte {
	t.Helper()
	room, err := s.Reserve(n)
	if err != nil || len(room) == 0 || len(room) > n {
		t.Fatalf("Reserve(%d): %d bytes, %v", n, len(room), err)
	}
	t.Cleanup(func() { s.Commit(0) }) // for a test that has failed
	return room
}

// writeLent writes all of data through lent memory.
func writeLent(t *testing.T, s *session.Session, data []byte) {
	t.Helper()
	for len(data) > 0 {
		n := copy(reserve(t, s, len(data)), data)
		if err := s.Commit(n); err != nil {
			t.Fatalf("Commit(%d): %v", n, err)
		}
		data = data[n:]
	}
}

// goReserve reserves n bytes and commits them unchanged.
func goReserve(s *session.Session, n int) <-chan result {
	c := make(chan result, 1)
	go func() {
		room, err := s.Reserve(n)
		if err == nil {
			err = s.Commit(copy(room, pattern(n)))
		}
		c <- result{len(room), err}
	}()
	return c
}

// goWriteBuffers writes p in slices.
func goWriteBuffers(s *session.Session, p []byte) <-chan result {
	c := make(chan result, 1)
	go func() {
		n, err := s.WriteBuffers([][]byte{p[:1], p[1:]})
		c <- result{int(n), err}
	}()
	return c
}

// waits fails unless the call still waits when nothing more happens.
func waits(t *testing.T, what string, c <-chan result) {
	t.Helper()
	pass(100 * time.Millisecond)
	select {
	case r := <-c:
		t.Fatalf("%s: %+v instead of waiting", what, r)
	default:
	}
}

// goReadAll reads to the end.
func goReadAll(s *session.Session) <-chan []byte {
	c := make(chan []byte, 1)
	go func() {
		b, _ := io.ReadAll(readerOf(s))
		c <- b
	}()
	return c
}

// isOpen reports whether the session has not ended yet.
func isOpen(s *session.Session) bool {
	select {
	case <-s.Closed():
		return false
	default:
		return true
	}
}

// Committed bytes have the same place in the stream as those of a Write.
func TestCommittedBytesComeInOrder(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		a, b, _, _ := pair(t, cfg, session.Config{SendBudget: 300_000}) // the send buffer wraps
		r := rand.New(rand.NewPCG(1, 1))
		data := pattern(2_000_000)
		all := goReadAll(b)
		lent := uint64(0)
		for at := 0; at < len(data); {
			part := data[at:min(len(data), at+int(duration(r, 1, 100_000)))]
			switch r.IntN(3) {
			case 0:
				writeAll(t, a, part, len(part))
			case 1:
				if w := within(t, goWriteBuffers(a, part)); w.err != nil {
					t.Fatal(w)
				}
			default:
				room := reserve(t, a, len(part))
				part = part[:min(len(room), r.IntN(len(part)+1))] // possibly none
				fill(room[copy(room, part):], usedRoom)
				if err := a.Commit(len(part)); err != nil {
					t.Fatal(err)
				}
				lent += uint64(len(part))
			}
			at += len(part)
		}
		if err := a.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		if got := <-all; !bytes.Equal(got, data) {
			t.Errorf("%d bytes of %d came, or wrong ones", len(got), len(data))
		}
		if st := a.Stats(); st.LentBytesSent != lent || st.BytesSent != uint64(len(data)) {
			t.Errorf("lent %d of %d bytes, and counted %d of %d", lent, len(data), st.LentBytesSent, st.BytesSent)
		}
	})
}

// A wrong Commit sends nothing, ends the loan, and leaves the stream as it is.
func TestCommitOfWhatWasNotLent(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		a, b, _, _ := pair(t, cfg, session.Config{})
		wantErr(t, "Commit without Reserve", a.Commit(1), session.ErrNotReserved)
		wantErr(t, "Commit of nothing without Reserve", a.Commit(0), session.ErrNotReserved)
		for _, n := range []int{-1, 101, 1 << 30} {
			room := reserve(t, a, 100)
			fill(room, usedRoom)
			wantErr(t, "Commit of what was not lent", a.Commit(n), session.ErrTooMuch)
			wantErr(t, "Commit after that", a.Commit(len(room)), session.ErrNotReserved)
		}
		reserve(t, a, 100)
		if err := a.Commit(0); err != nil {
			t.Errorf("Commit of nothing: %v", err)
		}
		writeLent(t, a, []byte("lent"))
		if got := readFull(t, b, 4); string(got) != "lent" {
			t.Errorf("%q arrived", got)
		}
		if st := a.Stats(); st.BytesSent != 4 || st.LentBytesSent != 4 {
			t.Errorf("counted: %+v", st)
		}
	})
}

// Reserve of no bytes, or of a negative number, lends at least one.
func TestReserveLendsAtLeastOneByte(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		a, _, _, _ := pair(t, cfg, session.Config{})
		for _, n := range []int{0, -1} {
			if room, err := a.Reserve(n); len(room) != 1 || err != nil {
				t.Errorf("Reserve(%d): %d bytes, %v", n, len(room), err)
			}
			a.Commit(0)
		}
	})
}

// Reserve of more than is possible lends as much as is possible.
func TestReserveOfAnyLength(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		a, b, _, _ := pair(t, cfg, session.Config{})
		for _, n := range []int{math.MaxInt, math.MaxInt - 8, math.MaxInt32} {
			copy(reserve(t, a, n), "abc")
			if err := a.Commit(3); err != nil {
				t.Errorf("Reserve(%d), Commit: %v", n, err)
			}
			if got := readFull(t, b, 3); string(got) != "abc" {
				t.Errorf("Reserve(%d): %q was read", n, got)
			}
		}
	})
}

// after are the operations that wait for the end of a loan.
var after = map[string]func(*session.Session, []byte) <-chan result{
	"Write":        goWrite,
	"WriteBuffers": goWriteBuffers,
	"Reserve":      func(s *session.Session, p []byte) <-chan result { return goReserve(s, len(p)) },
}

// The bytes of a Write during a loan follow those that are committed.
func TestAWriteWaitsForCommit(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		for _, size := range []int{2, 3000, 30_000, 100_000} {
			for what, start := range after {
				a, b, _, _ := pair(t, cfg, session.Config{})
				room := reserve(t, a, 100)
				fill(room, usedRoom)
				w := start(a, pattern(size))
				waits(t, what, w)
				if n := b.Stats().BytesReceived; n != 0 {
					t.Errorf("%s: %d bytes overtook the loan", what, n)
				}
				all := goReadAll(b)
				if err := a.Commit(len(room)); err != nil {
					t.Fatal(err)
				}
				r := within(t, w)
				if r.err != nil || r.n == 0 || what != "Reserve" && r.n != size {
					t.Errorf("%s of %d bytes: %+v", what, size, r)
				}
				a.CloseWrite()
				if got := <-all; changed(got[:len(room)], usedRoom) >= 0 || !bytes.Equal(got[len(room):], pattern(size)[:r.n]) {
					t.Errorf("%s: %d bytes came, or wrong ones", what, len(got))
				}
			}
		}
	})
}

// A Write that waits for Commit ends at its deadline and by Close, but the loan does not.
func TestAWriteThatWaitsForCommitEnds(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		for name, end := range map[string]struct {
			do   func(a, b *session.Session)
			want error
		}{
			"deadline":   {func(a, b *session.Session) { a.InterruptWrite(true) }, session.ErrInterrupted},
			"Close":      {func(a, b *session.Session) { go a.Close() }, session.ErrClosed},
			"Abort":      {func(a, b *session.Session) { go a.Abort() }, session.ErrClosed},
			"CloseWrite": {func(a, b *session.Session) { go a.CloseWrite() }, session.ErrClosed},
			"peer gone":  {func(a, b *session.Session) { go b.Close() }, syscall.EPIPE},
			"peer reset": {func(a, b *session.Session) { go b.Abort() }, syscall.ECONNRESET},
		} {
			for what, start := range after {
				a, b, _, _ := pair(t, cfg, session.Config{})
				room := reserve(t, a, 100)
				fill(room, usedRoom)
				w := start(a, pattern(50_000))
				waits(t, what, w)
				began := time.Now()
				end.do(a, b)
				if r := within(t, w); !errors.Is(r.err, end.want) || r.n != 0 {
					t.Errorf("%s, %s: %+v, want %v", name, what, r, end.want)
				}
				if d := time.Since(began); d > time.Second {
					t.Errorf("%s: %s has waited for %v", name, what, d)
				}
				if changed(room, usedRoom) >= 0 {
					t.Errorf("%s: the room was touched", name)
				}
				if a.InterruptWrite(false); end.want == session.ErrInterrupted {
					if err := a.Commit(len(room)); err != nil {
						t.Errorf("Commit: %v", err)
					}
					if got := readFull(t, b, len(room)); changed(got, usedRoom) >= 0 {
						t.Error("wrong bytes")
					}
					continue
				}
				pass(time.Second)
				want := end.want
				if want == syscall.ECONNRESET {
					want = syscall.EPIPE // the Write has returned the reset
				}
				wantErr(t, name+": Commit", a.Commit(len(room)), want)
			}
		}
	})
}

// Commit does not wait, so it does not matter whether a deadline has passed since Reserve.
func TestCommitBehindTheDeadline(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		a, b, _, _ := pair(t, cfg, session.Config{})
		copy(reserve(t, a, 4), "lent")
		a.InterruptWrite(true)
		if err := a.Commit(4); err != nil {
			t.Errorf("Commit: %v", err)
		}
		_, err := a.Reserve(1)
		wantErr(t, "Reserve", err, session.ErrInterrupted)
		if got := readFull(t, b, 4); string(got) != "lent" {
			t.Errorf("%q arrived", got)
		}
	})
}

// Urgent data does not wait for the end of a loan.
func TestUrgentDataOvertakesALoan(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		a, b, _, _ := pair(t, cfg, session.Config{})
		room := reserve(t, a, 1000)
		fill(room, usedRoom)
		if n, err := a.WriteUrgent([]byte("!")); n != 1 || err != nil {
			t.Fatal(n, err)
		}
		pass(time.Second)
		p := make([]byte, 9)
		if n, err := b.ReadUrgent(p); string(p[:n]) != "!" || err != nil {
			t.Errorf("read %q, %v", p[:n], err)
		}
		if err := a.Commit(len(room)); err != nil {
			t.Fatal(err)
		}
		if got := readFull(t, b, len(room)); changed(got, usedRoom) >= 0 {
			t.Error("wrong bytes")
		}
	})
}

// A second WriteUrgent during a loan waits for its end: it needs room of the provider for data, as the
// first one has used control's.
func TestUrgentDataDuringALongLoan(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		a, b, _, _ := pair(t, cfg, session.Config{})
		fill(reserve(t, a, 10), usedRoom)
		urgent := func() <-chan result {
			c := make(chan result, 1)
			go func() { n, err := a.WriteUrgent([]byte("!")); c <- result{n, err} }()
			return c
		}
		within(t, urgent())
		u := urgent()
		waits(t, "a second WriteUrgent", u)
		a.InterruptWrite(true)
		if r := within(t, u); !errors.Is(r.err, session.ErrInterrupted) {
			t.Error(r)
		}
		a.InterruptWrite(false)
		u = urgent()
		waits(t, "a second WriteUrgent", u)
		a.Commit(10)
		if r := within(t, u); r.err != nil {
			t.Error(r)
		}
		readFull(t, b, 10)
	})
}

// However a connection ends while room is lent, the call that ends it returns promptly, the room stays
// in place until Commit, Commit sends nothing, and then the session keeps nothing more.
func TestTheEndWhileRoomIsLent(t *testing.T) {
	type ends struct {
		do   func(a, b *session.Session, ea, eb *twin.Endpoint)
		want error // of Commit
		read error // for the peer, after what was written before
	}
	for name, end := range map[string]ends{
		"CloseWrite":   {func(a, b *session.Session, ea, eb *twin.Endpoint) { a.CloseWrite() }, session.ErrClosed, io.EOF},
		"Close":        {func(a, b *session.Session, ea, eb *twin.Endpoint) { a.Close() }, session.ErrClosed, io.EOF},
		"Abort":        {func(a, b *session.Session, ea, eb *twin.Endpoint) { a.Abort() }, session.ErrClosed, syscall.ECONNRESET},
		"peer's Close": {func(a, b *session.Session, ea, eb *twin.Endpoint) { b.Close() }, nil, session.ErrClosed},
		"peer's Abort": {func(a, b *session.Session, ea, eb *twin.Endpoint) { b.Abort() }, syscall.ECONNRESET, session.ErrClosed},
		"peer's death": {func(a, b *session.Session, ea, eb *twin.Endpoint) { eb.Kill() }, syscall.ECONNRESET, nil},
		"dead network": {func(a, b *session.Session, ea, eb *twin.Endpoint) { ea.Cut() }, syscall.ETIMEDOUT, nil},
	} {
		t.Run(name, func(t *testing.T) {
			each(t, func(t *testing.T, cfg twin.Config) {
				if name == "dead network" && cfg.Limits.Ring() {
					return // a ring has no network
				}
				a, b, ea, eb := pair(t, cfg, session.Config{KeepAlive: time.Second})
				writeAll(t, a, []byte("before"), 6)
				if got := readFull(t, b, 6); string(got) != "before" {
					t.Errorf("%q", got)
				}
				room := reserve(t, a, 1000)
				fill(room, usedRoom)
				began := time.Now()
				end.do(a, b, ea, eb)
				if d := time.Since(began); d > 100*time.Millisecond {
					t.Errorf("it took %v", d)
				}
				pass(time.Minute)
				if changed(room, usedRoom) >= 0 || ea.Retired() || !isOpen(a) {
					t.Errorf("the room was touched, or given back: %v", ea.Retired())
				}
				want := end.want
				if name == "peer's death" && cfg.Limits.Ring() {
					want = nil // the same as after Close
				}
				if err := a.Commit(len(room)); !errors.Is(err, want) {
					t.Errorf("Commit: %v, want %v", err, want)
				}
				wantErr(t, "another Commit", a.Commit(0), session.ErrNotReserved)
				if end.read != nil {
					n, err := b.Read(make([]byte, 100))
					if n != 0 || !errors.Is(err, end.read) {
						t.Errorf("the peer reads %d bytes, %v; want %v", n, err, end.read)
					}
				}
				a.Abort()
				<-a.Closed()
				if n := a.Stats().LentBytesSent; n != 0 {
					t.Errorf("%d lent bytes are counted", n)
				}
			})
		})
	}
}

// After Close there are no more loans.
func TestNoLoanAfterClose(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		a, b, _, _ := pair(t, cfg, session.Config{})
		writeAll(t, b, []byte("unread"), 6)
		pass(time.Second)
		a.Close()
		_, err := a.Reserve(1)
		wantErr(t, "Reserve", err, session.ErrClosed)
		_, err = a.Peek()
		wantErr(t, "Peek", err, session.ErrClosed)
		wantErr(t, "Commit", a.Commit(0), session.ErrNotReserved)
		wantErr(t, "Discard", a.Discard(1), session.ErrNotReserved)
		<-a.Closed()
	})
}

// If two loans are open when a connection ends, the session ends only when both have ended, in either
// order.
func TestTwoLoansAcrossClose(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		for _, readFirst := range []bool{true, false} {
			a, b, _, _ := pair(t, cfg, session.Config{})
			writeAll(t, b, pattern(1000), 1000)
			room, lent := reserve(t, a, 1000), peek(t, a)
			fill(room, usedRoom)
			a.Close()
			giveBack := []func(){
				func() { wantErr(t, "Commit", a.Commit(1), session.ErrClosed) },
				func() { wantErr(t, "Discard", a.Discard(len(lent)), nil) },
			}
			if readFirst {
				giveBack[0], giveBack[1] = giveBack[1], giveBack[0]
			}
			for _, f := range giveBack {
				pass(time.Minute)
				if !isOpen(a) {
					t.Error("it has given back what is lent")
				}
				f()
			}
			<-a.Closed()
		}
	})
}

// When credit or the ring is used up and the send buffer is full, Reserve waits. Room comes as the peer
// reads.
func TestReserveWaitsForRoom(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		a, b, _, _ := pair(t, cfg, session.Config{SendBudget: 60_000, ReceiveBudget: 60_000})
		data := pattern(1 << 20)
		sent := 0
		done := make(chan result, 1)
		go func() {
			for sent < len(data) {
				room, err := a.Reserve(len(data) - sent)
				if err != nil {
					done <- result{sent, err}
					return
				}
				n := copy(room, data[sent:])
				if err := a.Commit(n); err != nil {
					t.Error(err)
				}
				sent += n
			}
			done <- result{sent, nil}
		}()
		waits(t, "Reserve", done)
		if sent == 0 {
			t.Error("no room at all")
		}
		if got := readFull(t, b, len(data)); !bytes.Equal(got, data) {
			t.Error("wrong bytes")
		}
		if r := within(t, done); r.err != nil || r.n != len(data) {
			t.Error(r)
		}
	})
}

// A Reserve that waits for room ends as a Write does.
func TestAReserveThatWaitsForRoomEnds(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		for name, end := range map[string]struct {
			do   func(a, b *session.Session)
			want error
		}{
			"deadline":   {func(a, b *session.Session) { a.InterruptWrite(true) }, session.ErrInterrupted},
			"Close":      {func(a, b *session.Session) { go a.Close() }, session.ErrClosed},
			"Abort":      {func(a, b *session.Session) { go a.Abort() }, session.ErrClosed},
			"CloseWrite": {func(a, b *session.Session) { go a.CloseWrite() }, session.ErrClosed},
			"peer gone":  {func(a, b *session.Session) { go b.Close() }, syscall.ECONNRESET}, // with unread bytes, so a reset
			"peer reset": {func(a, b *session.Session) { go b.Abort() }, syscall.ECONNRESET},
		} {
			a, b, _, _ := pair(t, cfg, session.Config{SendBudget: 60_000, ReceiveBudget: 60_000})
			full := make(chan result, 1)
			go func() {
				for {
					room, err := a.Reserve(4000)
					if err == nil {
						err = a.Commit(len(room))
					}
					if err != nil {
						full <- result{0, err}
						return
					}
				}
			}()
			waits(t, "Reserve", full)
			end.do(a, b)
			if r := within(t, full); !errors.Is(r.err, end.want) {
				t.Errorf("%s: %v, want %v", name, r.err, end.want)
			}
			go a.Abort()
			<-a.Closed() // nothing is lent, so this does not wait for a loan
		}
	})
}

// A send buffer that is lent counts as in use, however long nothing is written.
func TestALentBufferIsNotIdle(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, e, p := negotiated(t, buffered, session.Config{})
		in := p.open(s, 50_000)
		data := pattern(60_000)
		writeLent(t, s, data[:20_000])
		in.read(20_000)
		room := reserve(t, s, 20_000)
		n := copy(room, data[20_000:])
		pass(time.Minute)
		if m := p.recv(); m != nil {
			t.Fatalf("a message of type %d during the loan", m[0])
		}
		if !bytes.Equal(room, data[20_000:20_000+n]) {
			t.Error("the room was touched")
		}
		if err := s.Commit(n); err != nil {
			t.Fatal(err)
		}
		if got, _ := in.read(n); !bytes.Equal(got, data[20_000:20_000+n]) {
			t.Error("wrong bytes")
		}
		pass(2 * time.Second) // an idle send buffer is kept for one to two seconds
		p.expect(tLeaveInbox)
		if left := e.Left(); left.Allocated != 0 {
			t.Errorf("kept: %+v", left)
		}
	})
}

// If a send buffer cannot be registered any more while it is lent, the committed bytes go in messages.
func TestALentBufferThatCannotBeRegistered(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, w, p := failing(t)
		in := p.open(s, 50_000)
		data := pattern(100_000)
		writeLent(t, s, data[:20_000])
		if got, _ := in.read(20_000); !bytes.Equal(got, data[:20_000]) {
			t.Error("wrong bytes in the inbox")
		}
		room := reserve(t, s, 20_000)
		n := copy(room, data[20_000:])
		w.fail.Store(true)
		if err := s.Commit(n); err != nil {
			t.Fatal(err)
		}
		if got := p.data(n); !bytes.Equal(got, data[20_000:20_000+n]) {
			t.Error("wrong bytes in messages")
		}
		if w.failed.Load() != 1 {
			t.Errorf("%d attempts to write", w.failed.Load())
		}
		at := 20_000 + n
		writeLent(t, s, data[at:at+20_000]) // after that the session leaves the inbox
		p.expect(tLeaveInbox)
		if got := p.data(20_000); !bytes.Equal(got, data[at:at+20_000]) {
			t.Error("wrong bytes behind it")
		}
	})
}

// Bytes that are committed to an empty registered send buffer are sent at once: small pieces in messages, larger
// ones to the inbox, in their order.
func TestSmallLoansOfARegisteredBufferGoAsMessages(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, buffered, session.Config{})
		in := p.open(s, 50_000)
		data := pattern(30_000)
		writeLent(t, s, data[:10_000])
		writeLent(t, s, data[10_000:11_000])
		writeLent(t, s, data[11_000:21_000])
		got, _ := in.read(10_000)
		got = append(got, p.data(1000)...)
		rest, _ := in.read(10_000)
		if got = append(got, rest...); !bytes.Equal(got, data[:21_000]) {
			t.Error("wrong bytes")
		}
	})
}

// Loans do not make the session poll: a Write that waits for Commit sleeps.
func TestAWriteThatWaitsForCommitSleeps(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		a, b, ea, _ := pair(t, cfg, session.Config{})
		reserve(t, a, 10)
		w := goWrite(a, pattern(100))
		waits(t, "Write", w)
		before := ea.Calls()
		nap(time.Hour)
		synctest.Wait()
		if n := ea.Calls() - before; n > 10 {
			t.Errorf("%d calls during an hour", n)
		}
		a.Commit(0)
		if r := within(t, w); r.err != nil {
			t.Error(r)
		}
		readFull(t, b, 100)
	})
}

// An operation that waits for room in the queue of RDMA writes sleeps until one has completed.
func TestWhoWaitsForRDMAWritesSleeps(t *testing.T) {
	for what, start := range after {
		inBubble(t, func(t *testing.T) {
			narrow := buffered
			narrow.RDMAQueue = 1
			a, b, ea, _ := pair(t, narrow, session.Config{SendBudget: 60_000})
			for range 2 { // the second time through an inbox
				writeAll(t, a, pattern(10_000), 10_000)
				readFull(t, b, 10_000)
				pass(100 * time.Millisecond)
			}
			ea.Hold(twin.HoldWrites)
			done := make(chan result, 1)
			go func() {
				for range 20 {
					if r := <-start(a, pattern(10_000)); r.err != nil {
						done <- r
						return
					}
				}
				done <- result{}
			}()
			waits(t, what, done)
			before := ea.Calls()
			pass(10 * time.Second)
			if n := ea.Calls() - before; n > 100 {
				t.Errorf("%s: %d calls during 10 seconds", what, n)
			}
			ea.Hold(0)
			go io.Copy(io.Discard, readerOf(b))
			if r := within(t, done); r.err != nil {
				t.Error(r)
			}
		})
	}
}

// When a loan of the send buffer ends unused, a Write that waits for it is woken.
func TestAWriteIsWokenByACommitOfNothing(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, buffered, session.Config{})
		p.open(s, 50_000)
		for _, size := range []int{10, 10_000} {
			reserve(t, s, 100)
			w := goWrite(s, pattern(size))
			waits(t, "Write", w)
			s.Commit(0)
			pass(time.Second)
			select {
			case <-w:
			default:
				t.Errorf("a Write of %d bytes waits", size)
			}
		}
	})
}

// A small loan's bytes follow what the send buffer has not sent yet.
func TestASmallLoanStaysBehindTheSendBuffer(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, buffered, session.Config{})
		in := p.open(s, 30_000)
		data := pattern(41_000)
		writeAll(t, s, data[:40_000], 10_000) // the inbox is full
		writeLent(t, s, data[40_000:])
		got, _ := in.read(30_000)
		in.emptied()
		rest, _ := in.read(11_000)
		if got = append(got, rest...); !bytes.Equal(got, data) {
			t.Error("wrong bytes")
		}
	})
}

// After the peer's Close, Reserve still lends once, but committed bytes are not sent. While that loan is
// open, or one from before the Close, another Reserve fails at once.
func TestReserveAndCommitBehindThePeersClose(t *testing.T) {
	for name, cfg := range map[string]twin.Config{"messages": messages, "ring": ring} {
		for lent, before := range map[string]bool{"lent before": true, "lent behind": false} {
			t.Run(name+"/"+lent, func(t *testing.T) {
				inBubble(t, func(t *testing.T) {
					s, _, p := negotiated(t, cfg, session.Config{KeepAlive: -1})
					reserve := func() []byte {
						room, err := s.Reserve(100)
						if len(room) == 0 || err != nil {
							t.Fatalf("Reserve: %d bytes, %v", len(room), err)
						}
						return room
					}
					var room []byte
					if before {
						room = reserve()
					}
					p.send(tClose, 0)
					pass(time.Second)
					if !before {
						room = reserve()
					}
					other, err := s.Reserve(100)
					wantErr(t, "another Reserve", err, syscall.EPIPE)
					if len(other) > 0 {
						t.Error("it lends as well")
					}
					s.Commit(copy(room, pattern(100)))
					for m := p.recv(); m != nil; m = p.recv() {
						if m[0] == tData {
							t.Error("the peer is sent bytes")
						}
					}
				})
			})
		}
	}
}
