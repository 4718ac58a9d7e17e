package session_test

import (
	"bytes"
	"errors"
	"io"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/session"
)

// noted returns a Config whose session sends the peer's notes to the channel.
func noted() (session.Config, <-chan []byte) {
	c := make(chan []byte, 20)
	return session.Config{OnNote: func(note []byte) { c <- note }}, c
}

// wantNote waits for the peer's next note, or for the end of the connection if want is empty.
func wantNote(t *testing.T, c <-chan []byte, want string) {
	t.Helper()
	select {
	case got := <-c:
		if string(got) != want || (got == nil) != (want == "") {
			t.Errorf("the note %q, want %q", got, want)
		}
	case <-time.After(time.Minute):
		t.Errorf("no note, want %q", want)
	}
}

// sendNote sends a note, which has to succeed.
func sendNote(t *testing.T, s *session.Session, note string) {
	t.Helper()
	if err := s.SendNote([]byte(note)); err != nil {
		t.Fatalf("SendNote: %v", err)
	}
}

// WritePosition counts the bytes that each way of writing has taken, and ReadPosition those that each
// way of reading has returned.
func TestPositionsCountWhatWasTakenAndGiven(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		scfg, notes := noted()
		a, b, _, _ := pair(t, inPieces(cfg), scfg)
		data := pattern(200_000)
		taken := make(chan int, 1)
		go func() {
			a.Write(data[:1])
			a.Write(data)
			a.WriteBuffers([][]byte{data[:10], nil, data[:20], data})
			room, _ := a.Reserve(1000)
			a.Commit(len(room) - 1)
			taken <- 1 + len(data) + 30 + len(data) + len(room) - 1
			if n := a.WritePosition(); n != a.Stats().BytesSent {
				t.Errorf("the position is %d, and %d bytes were sent", n, a.Stats().BytesSent)
			}
			sendNote(t, a, "all of it")
			wantNote(t, notes, "all of it")
			a.CloseWrite()
		}()
		got := 0
		for k := 0; ; k++ {
			n, err := 0, error(nil)
			if k%2 == 0 {
				n, err = b.Read(make([]byte, 120_000))
			} else {
				var p []byte
				p, err = b.Peek()
				n = len(p) / 2
				b.Discard(n)
			}
			if got += n; b.ReadPosition() != uint64(got) {
				t.Fatalf("%d bytes were read, the position is %d", got, b.ReadPosition())
			}
			if err != nil {
				wantErr(t, "the end", err, io.EOF)
				break
			}
		}
		if n := <-taken; n != got || a.Stats().BytesSent != uint64(n) {
			t.Errorf("%d bytes were taken and %d read, the position is %d", n, got, a.Stats().BytesSent)
		}
	})
}

// A note needs neither a Read at the peer nor room for data, and bytes that are written after it do not
// overtake it.
func TestANoteNeedsNobodyToRead(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		scfg, notes := noted()
		scfg.ReceiveBudget, scfg.SendBudget = 1, 1
		a, b, _, _ := pair(t, cfg, scfg)
		data := pattern(4 << 20)
		w := goWrite(a, data)
		readFull(t, b, 100)
		pass(time.Second)
		a.InterruptWrite(true)
		x := within(t, w)
		if at := a.WritePosition(); uint64(x.n) != at {
			t.Errorf("the Write took %d bytes, the position is %d", x.n, at)
		}
		sendNote(t, a, "here") // InterruptWrite has no effect on it
		wantNote(t, notes, "here")
		a.InterruptWrite(false)
		w = goWrite(a, []byte("returned"))
		if got := readFull(t, b, x.n-100); !bytes.Equal(got, data[100:x.n]) {
			t.Error("other bytes than were written")
		}
		if got := readFull(t, b, 8); string(got) != "returned" {
			t.Errorf("%q is returned", got)
		}
		within(t, w)
	})
}

// A note that waits for room is sent before the bytes that are written after it.
func TestNothingGoesBeforeANoteThatWaits(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		e := &noControl{}
		s, _, p := negotiatedOn(t, messages, session.Config{}, func(under *twin.Endpoint) session.Endpoint {
			e.Endpoint = under
			return e
		})
		e.full = true
		sendNote(t, s, "first")
		w := goWrite(s, []byte("returned"))
		pass(time.Second)
		e.full = false
		p.send(tPing, 0) // makes the session look
		if note := p.expect(tNote); string(note) != "first" {
			t.Errorf("the note %q", note)
		}
		within(t, w)
		for m := p.recv(); m[0] != tData; m = p.recv() {
			if m[0] != tPong {
				t.Fatalf("a message of type %d", m[0])
			}
		}
	})
}

// A note has 1 to maxNote bytes, and comes before Close. Any other note ends the connection.
func TestANoteOutOfPlaceEndsTheConnection(t *testing.T) {
	note := says(tNote, 0, 'n')
	for name, tt := range map[string]struct {
		steps   []step
		fine    bool
		inOrder bool
	}{
		"one":             {[]step{note}, true, false},
		"two":             {[]step{note, note}, true, false},
		"an empty one":    {[]step{says(tNote, 0)}, false, false},
		"the longest":     {[]step{says(tNote, 0, make([]byte, maxNote)...)}, true, false},
		"a longer one":    {[]step{says(tNote, 0, make([]byte, maxNote+1)...)}, false, false},
		"behind Shutdown": {[]step{says(tShutdown, 0), note}, true, true},
		"behind Close":    {[]step{says(tClose, 0), note}, false, true},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				scfg, notes := noted()
				s, _, p := negotiated(t, messages, scfg)
				for _, step := range tt.steps {
					step(p)
				}
				pass(time.Second)
				if tt.fine {
					<-notes
					writeAll(t, s, []byte("alive"), 5)
					return
				}
				endsByViolation(t, s, tt.inOrder)
			})
		})
	}
}

// More notes than a session ever needs wait for the layer above: that ends the connection.
func TestAFloodOfNotesEndsTheConnection(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		stuck := make(chan struct{})
		defer close(stuck)
		s, _, p := negotiated(t, messages, session.Config{OnNote: func([]byte) { <-stuck }})
		for range 12 {
			p.send(tNote, 0, 'n')
			pass(time.Millisecond)
		}
		pass(time.Second)
		endsByViolation(t, s, false)
	})
}

// SendNote fails when a Write would, except after the end of this end's stream.
func TestSendNoteFails(t *testing.T) {
	for name, tt := range map[string]struct {
		before func(a, b *session.Session)
		want   error
	}{
		"after CloseWrite":     {func(a, b *session.Session) { a.CloseWrite() }, nil},
		"after Close":          {func(a, b *session.Session) { a.Close() }, session.ErrClosed},
		"to a peer that reset": {func(a, b *session.Session) { b.Abort() }, syscall.ECONNRESET},
	} {
		t.Run(name, func(t *testing.T) {
			each(t, func(t *testing.T, cfg twin.Config) {
				scfg, _ := noted()
				a, b, _, _ := pair(t, cfg, scfg)
				tt.before(a, b)
				pass(time.Second)
				if err := a.SendNote([]byte{1}); !errors.Is(err, tt.want) {
					t.Errorf("SendNote: %v, want %v", err, tt.want)
				}
			})
		})
	}
}

// The end of the connection is reported after the notes, once, even if no Read or Write is in progress.
func TestTheEndComesBehindTheNotes(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		scfg, notes := noted()
		a, b, _, _ := pair(t, cfg, scfg)
		sendNote(t, a, "one")
		sendNote(t, a, "two")
		wantNote(t, notes, "one")
		wantNote(t, notes, "two")
		b.Abort()
		wantNote(t, notes, "")
	})
}

// On a ring, notes may be sent while the peer's Negotiate has not come yet. The race detector checks
// what both use.
func TestNotesBesideNegotiate(t *testing.T) {
	for range 50 {
		ea, eb := twin.Pair(twin.Config{})
		a := session.New(ea, session.Config{})
		cfg, notes := noted()
		cfg.Accepting = true
		b := session.New(eb, cfg)
		var wg sync.WaitGroup
		for _, s := range []*session.Session{a, b} {
			wg.Go(func() {
				if err := s.Negotiate(t.Context()); err != nil {
					t.Error(err)
				}
			})
		}
		sendNote(t, a, "one")
		sendNote(t, a, "two")
		wg.Wait()
		wantNote(t, notes, "one")
		wantNote(t, notes, "two")
		for _, s := range []*session.Session{a, b} {
			s.Abort()
			<-s.Closed()
		}
	}
}

// If the connection has ended before Negotiate, the end is reported after it: the peer's first message
// is still to be handled.
func TestAnEndThatWasBeforeNegotiate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ea, eb := twin.Pair(twin.Config{})
		a := session.New(ea, session.Config{})
		cfg, notes := noted()
		cfg.Accepting = true
		b := session.New(eb, cfg)
		defer b.Abort()
		if err := a.Close(); err != nil {
			t.Fatal(err)
		}
		b.Wake(session.RecvReady)
		synctest.Wait()
		if len(notes) > 0 {
			t.Error("the end was told before there was a beginning")
		}
		if err := b.Negotiate(t.Context()); err != nil {
			t.Fatal(err)
		}
		wantNote(t, notes, "")
	})
}

// OnNote may close the session, even by a call that waits for it.
func TestOnNoteMayClose(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		var b *session.Session
		closed := make(chan error, 2)
		a, b, _, _ := pair(t, cfg, session.Config{OnNote: func(note []byte) {
			if note != nil {
				closed <- b.Close()
			}
		}})
		sendNote(t, a, "close")
		if err := <-closed; err != nil {
			t.Errorf("Close: %v", err)
		}
		select {
		case <-b.Closed():
		case <-time.After(time.Minute):
			t.Error("never closed")
		}
	})
}

// A direction that was taken belongs to the layer above alone, which deadlines do not concern, until it
// is given back.
func TestTakenOperations(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		a, b, _, _ := pair(t, cfg, session.Config{})
		r := goRead(b, make([]byte, 10))
		pass(time.Second)
		b.TakeRead()
		if x := within(t, r); x.n != 0 || x.err != session.ErrTaken {
			t.Errorf("a Read that waits: %d, %v", x.n, x.err)
		}
		a.TakeWrite()
		if n, err := a.Write([]byte("application")); n != 0 || err != session.ErrTaken {
			t.Errorf("a Write: %d, %v", n, err)
		}
		a.InterruptWrite(true)
		b.InterruptRead(true)
		if n, err := a.WriteTaken([]byte("above")); n != 5 || err != nil {
			t.Errorf("WriteTaken: %d, %v", n, err)
		}
		p := make([]byte, 10)
		if n, err := b.ReadTaken(p, nil); string(p[:n]) != "above" || err != nil {
			t.Errorf("ReadTaken: %q, %v", p[:n], err)
		}
		a.InterruptWrite(false)
		b.InterruptRead(false)
		a.GiveBackWrite()
		b.GiveBackRead(true)
		writeAll(t, a, []byte("application"), 11)
		readFull(t, b, 11)
	})
}

// If the peer's layer above sends the note by which it leaves, and then ends the stream, only the layer
// above here reads EOF. For the program that stream was cut, as the peer's program had more to write.
func TestAnEndForTheTaker(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		scfg := session.Config{OnNote: func([]byte) {}}
		for _, before := range []bool{false, true} {
			a, b, _, _ := pair(t, cfg, scfg)
			sendNote(t, a, "begin")
			b.TakeRead()
			if before {
				a.CloseWrite()
			}
			sendNote(t, a, "leave")
			a.CloseWrite()
			pass(time.Second)
			if n, err := b.ReadTaken(make([]byte, 1), nil); n != 0 || err != io.EOF {
				t.Errorf("ReadTaken: %d, %v", n, err)
			}
			for _, cut := range []bool{false, true} { // false: as if the note had been another one
				b.GiveBackRead(cut)
				want := io.EOF
				if cut && !before {
					want = syscall.ECONNRESET
				}
				if n, err := b.Read(make([]byte, 1)); n != 0 || !errors.Is(err, want) {
					t.Errorf("ended before: %v: %d, %v", before, n, err)
				}
			}
			a.Abort()
			b.Abort()
		}
	})
}

// CloseUnread is a reset after everything that was written, even if the session has nothing unread.
func TestCloseUnreadIsAReset(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		a, b, _, _ := pair(t, cfg, session.Config{})
		writeAll(t, a, pattern(2000), 2000)
		if err := a.CloseUnread(); err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(readerOf(b))
		wantErr(t, "reading to the end", err, syscall.ECONNRESET)
		if !bytes.Equal(got, pattern(2000)) {
			t.Errorf("%d bytes before the reset, want 2000", len(got))
		}
		wantErr(t, "Close once more", a.Close(), session.ErrClosed)
	})
}

// starver is an endpoint whose ring gets no memory while has is false.
type starver struct {
	*twin.Endpoint
	has *atomic.Bool
}

func (s starver) Starved() bool { return !s.has.Load() }
func (s starver) Spare() int64  { return 0 }

// A Write that waits for memory which others have used up is reported each second, as long as the peer
// takes nothing, and goes on waiting. A Write that makes progress is not reported, nor one for which
// there is memory again.
func TestAStarvingWriteIsReported(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		starved := make(chan []byte, 20)
		var has atomic.Bool
		a, b, _, _ := pairOn(t, ring, session.Config{OnNote: func(note []byte) { starved <- note }},
			func(e *twin.Endpoint) session.Endpoint { return starver{e, &has} })
		sent := make(chan error, 1)
		go func() {
			_, err := b.Write(pattern(1 << 20))
			sent <- err
		}()
		p := make([]byte, 16<<10)
		for range 10 { // for longer than a Write waits before it is reported
			pass(300 * time.Millisecond)
			if _, err := a.Read(p); err != nil {
				t.Fatal(err)
			}
		}
		has.Store(true)
		pass(4 * time.Second)
		has.Store(false)
		if n := len(starved); n != 0 {
			t.Fatalf("%d reports of one that goes on, or has memory", n)
		}
		if _, err := a.Read(p); err != nil { // the Write looks again
			t.Fatal(err)
		}
		pass(2 * time.Second)
		first := len(starved)
		if pass(4 * time.Second); first == 0 || first > 2 || len(starved) != first+4 {
			t.Fatalf("%d reports, and %d in 4 s more, of a peer that does not read", first, len(starved)-first)
		}
		if note := <-starved; note == nil || len(note) != 0 {
			t.Errorf("the note %q", note)
		}
		go io.Copy(io.Discard, a)
		if err := <-sent; err != nil {
			t.Error(err)
		}
	})
}

// strictWake is an endpoint that wakes the session only for what is armed.
type strictWake struct {
	lateArm
	session.Waker
	armed atomic.Uint32 // session.Events
}

func (e *strictWake) Start(w session.Waker) {
	e.Waker = w
	e.Endpoint.Start(e)
}

func (e *strictWake) Arm(ev session.Events) {
	e.lateArm.Arm(ev)
	e.armed.Or(uint32(ev))
}

func (e *strictWake) Wake(ev session.Events) {
	if bits := e.armed.Swap(0) & uint32(ev); bits != 0 {
		e.Waker.Wake(session.Events(bits))
	}
}

// An end that comes after a note, just before the session is armed again, is reported, even if the
// endpoint does not wake the session for it.
func TestAnEndBeforeArmIsTold(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		scfg, notes := noted()
		e := &strictWake{}
		_, _, p := negotiatedOn(t, ring, scfg, func(under *twin.Endpoint) session.Endpoint {
			e.Endpoint = under
			return e
		})
		e.before(func() {
			p.Abort()
			nap(2 * latency)
		})
		p.send(tNote, 0, 'n')
		wantNote(t, notes, "n")
		wantNote(t, notes, "")
	})
}
