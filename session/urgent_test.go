package session_test

import (
	"bytes"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/session"
)

// D10: urgent data passes data that waits, and needs no Read.
func TestUrgentPassesBlockedData(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		a, b, _, _ := pair(t, cfg, session.Config{ReceiveBudget: 1, SendBudget: 1})
		data := pattern(1 << 20)
		w := goWrite(a, data)
		pass(time.Second)
		if _, err := a.WriteUrgent([]byte("now!")); err != nil {
			t.Fatalf("WriteUrgent: %v", err)
		}
		select {
		case <-b.Urgent():
		case <-time.After(time.Second):
			t.Fatal("urgent data waits behind data")
		}
		got := make([]byte, 100)
		n, err := b.ReadUrgent(got)
		if string(got[:n]) != "now!" || err != nil {
			t.Errorf("ReadUrgent: %q, %v", got[:n], err)
		}
		_, err = b.ReadUrgent(got)
		wantErr(t, "ReadUrgent once more", err, session.ErrNoUrgent)
		if got := readFull(t, b, len(data)); !bytes.Equal(got, data) {
			t.Error("urgent data is in the stream")
		}
		within(t, w)
	})
}

// Urgent data has 1 to MaxUrgent bytes, and replaces what was not read.
func TestUrgentDataIsShortAndTheNewestCounts(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, b, _, _ := pair(t, messages, session.Config{})
		for _, n := range []int{0, session.MaxUrgent + 1} {
			if _, err := a.WriteUrgent(make([]byte, n)); err == nil {
				t.Errorf("%d bytes of urgent data were taken", n)
			}
		}
		for i := range byte(3) { // the newest replaces what was not read
			if _, err := a.WriteUrgent(bytes.Repeat([]byte{i}, session.MaxUrgent)); err != nil {
				t.Fatal(err)
			}
		}
		pass(time.Second)
		got := make([]byte, 10)
		if n, err := b.ReadUrgent(got); n != 10 || err != nil || got[0] != 2 {
			t.Errorf("ReadUrgent: %d, %v, %v", n, err, got)
		}
	})
}

// Of a peer's urgent data no more than MaxUrgent bytes are kept.
func TestUrgentOfThePeerIsBounded(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, messages, session.Config{KeepAlive: -1})
		p.send(tUrgent, 0, pattern(10*session.MaxUrgent)...)
		pass(time.Second)
		got := make([]byte, 20*session.MaxUrgent)
		n, err := s.ReadUrgent(got)
		if err != nil || !bytes.Equal(got[:n], pattern(session.MaxUrgent)) {
			t.Errorf("ReadUrgent: %d bytes, %v", n, err)
		}
	})
}

// ReadUrgent returns what has arrived, though nobody has polled since.
func TestUrgentDataIsThereBeforeAnyPoll(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, messages, session.Config{})
		p.send(tUrgent, 0, 'u')
		pass(2 * latency)
		b := make([]byte, 10)
		if n, err := s.ReadUrgent(b); n != 1 || b[0] != 'u' || err != nil {
			t.Errorf("ReadUrgent: %d, %v", n, err)
		}
	})
}

// Of what is held back for control, urgent data takes one message, until data has had
// room again.
func TestUrgentLeavesControlItsCredit(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, messages, session.Config{})
		goWrite(s, pattern(4<<20))
		pass(time.Second)
		for range 3 {
			first := make(chan result, 1)
			go func() { n, err := s.WriteUrgent([]byte("1")); first <- result{n, err} }()
			second := make(chan result, 1)
			pass(time.Second)
			go func() { n, err := s.WriteUrgent([]byte("2")); second <- result{n, err} }()
			pass(time.Second)
			select {
			case x := <-first:
				if x.err != nil {
					t.Error(x.err)
				}
			default:
				t.Error("there is no room for urgent data")
			}
			select {
			case x := <-second:
				t.Errorf("it takes more of what is control's: %+v", x)
			default:
			}
			for m := p.recv(); m != nil; m = p.recv() { // all that it could send
			}
			p.send(tCredit, 0)
			within(t, second)
			pass(time.Second)
			for m := p.recv(); m != nil; m = p.recv() {
			}
			p.send(tCredit, 0) // so that data has room again
			pass(time.Second)
		}
	})
}

// A WriteUrgent that ends as a Write sleeps leaves the endpoint armed for that Write: it
// need not wait until the idle poller comes.
func TestAWriteIsWokenThoughAnUrgentOneEnds(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		e := &lateArm{}
		s, _, p := negotiatedOn(t, messages, session.Config{}, func(under *twin.Endpoint) session.Endpoint {
			e.Endpoint = under
			return e
		})
		goWrite(s, pattern(4<<20))
		pass(time.Second)
		if _, err := s.WriteUrgent([]byte("1")); err != nil {
			t.Fatal(err)
		}
		progress := func() { // the Write goes on
			var ev session.Event
			for p.Poll(&ev) {
				if ev.Msg[0] != tCredit {
					p.dropped++
				}
				p.Drop()
			}
			p.send(tCredit, 0)
			pass(4 * latency)
		}
		e.before(progress) // as the second one is about to sleep
		within(t, goUrgent(s))
		before := s.Stats().BytesSent
		progress()
		if s.Stats().BytesSent == before {
			t.Error("a Write sleeps though there is credit")
		}
	})
}

// goUrgent is WriteUrgent of one byte.
func goUrgent(s *session.Session) <-chan result {
	c := make(chan result, 1)
	go func() { n, err := s.WriteUrgent([]byte("!")); c <- result{n, err} }()
	return c
}

// A WriteUrgent that waits ends with the peer's reading, though it is its own last look
// before it sleeps that finds the Close.
func TestAnUrgentWriteEndsAsThePeerCloses(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		e := &slowArrival{}
		s, _, p := negotiatedOn(t, ring, session.Config{}, func(under *twin.Endpoint) session.Endpoint {
			e.Endpoint = under
			return e
		})
		calls := []<-chan result{goWrite(s, pattern(1<<20))}
		pass(time.Second) // it has filled the ring, up to less than it needs
		for range 500 {   // the last ones find no room
			calls = append(calls, goUrgent(s))
		}
		pass(time.Second)
		s.InterruptWrite(true)
		for _, c := range calls {
			within(t, c)
		}
		s.InterruptWrite(false)
		e.late.Store(true)
		p.send(tClose, 0)
		pass(time.Second)
		e.before(func() { // the interrupt has left something that ends its first sleep
			e.before(func() { e.late.Store(false) })
		})
		last := goUrgent(s)
		pass(time.Second)
		select {
		case x := <-last:
			wantErr(t, "WriteUrgent", x.err, syscall.EPIPE)
		default:
			t.Error("it waits for a peer that has closed")
		}
	})
}

// A session by which nothing but urgent data has gone is listened to behind a WriteUrgent that found room
// as it was about to sleep: the peer's notes, and its end, come while nobody reads or writes.
func TestHeardBehindAnUrgentWriteThatWaited(t *testing.T) {
	each(t, func(t *testing.T, cfg twin.Config) {
		cfg.QueueBytes = 8 << 10
		scfg, notes := noted()
		e := &lateArm{}
		s, _, p := negotiatedOn(t, cfg, scfg, func(under *twin.Endpoint) session.Endpoint {
			e.Endpoint = under
			return e
		})
		waited := false
		e.before(func() { // there is no room, or credit
			waited = true
			for p.recv() != nil {
			}
			p.send(tCredit, 0)
			pass(4 * latency)
		})
		for !waited {
			if x := within(t, goUrgent(s)); x.err != nil {
				t.Fatal(x.err)
			}
		}
		pass(time.Second)
		p.send(tNote, 0, 'n')
		wantNote(t, notes, "n")
	})
}

// A WriteUrgent that waits ends with this end's direction.
func TestAnUrgentWriteEndsWithItsDirection(t *testing.T) {
	for name, end := range map[string]func(*session.Session){
		"CloseWrite": func(s *session.Session) { s.CloseWrite() },
		"Close":      func(s *session.Session) { s.Close() },
		"Abort":      (*session.Session).Abort,
	} {
		inBubble(t, func(t *testing.T) {
			s, _, p := negotiated(t, messages, session.Config{}) // a peer that gives no credit
			w := goWrite(s, pattern(1<<20))
			pass(time.Second)
			if r := within(t, goUrgent(s)); r.err != nil { // by a credit for control
				t.Fatal(r.err)
			}
			u := goUrgent(s)
			waits(t, "WriteUrgent", u)
			for range session.ControlReserve { // the answers use the other credits up: no Shutdown leaves, either
				p.send(tPing, 0)
			}
			pass(time.Second)
			go end(s)
			pass(time.Second)
			select {
			case r := <-u:
				wantErr(t, name, r.err, session.ErrClosed)
			default:
				t.Errorf("%s: WriteUrgent waits", name)
			}
			within(t, w)
		})
	}
}
