package session_test

import (
	"bytes"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/session"
)

// D10: urgent data overtakes data that waits, and arrives without a Read.
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

// Urgent data has 1 to MaxUrgent bytes, and replaces urgent data that was not read.
func TestUrgentDataIsShortAndTheNewestCounts(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, b, _, _ := pair(t, messages, session.Config{})
		for _, n := range []int{0, session.MaxUrgent + 1} {
			if _, err := a.WriteUrgent(make([]byte, n)); err == nil {
				t.Errorf("%d bytes of urgent data were taken", n)
			}
		}
		for i := range byte(3) { // each replaces the one before
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

// At most MaxUrgent bytes of a peer's urgent data are kept.
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

// ReadUrgent returns what has arrived, even if nothing has polled since.
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

// Urgent data may use one of the credits that are reserved for control, and no other one before data has
// had room again.
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

// A WriteUrgent that ends while a Write sleeps leaves the endpoint armed for the Write, so that the
// Write does not have to wait for the idle poller.
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
		progress := func() { // lets the Write go on
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
		e.before(progress) // as the second WriteUrgent is about to sleep
		within(t, goUrgent(s))
		before := s.Stats().BytesSent
		progress()
		if s.Stats().BytesSent == before {
			t.Error("a Write sleeps though there is credit")
		}
	})
}

// goUrgent writes one byte of urgent data.
func goUrgent(s *session.Session) <-chan result {
	c := make(chan result, 1)
	go func() { n, err := s.WriteUrgent([]byte("!")); c <- result{n, err} }()
	return c
}

// A WriteUrgent that waits ends when the peer closes, even if it finds the Close only in its last look
// before it sleeps.
func TestAnUrgentWriteEndsAsThePeerCloses(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		e := &slowArrival{}
		s, _, p := negotiatedOn(t, ring, session.Config{}, func(under *twin.Endpoint) session.Endpoint {
			e.Endpoint = under
			return e
		})
		calls := []<-chan result{goWrite(s, pattern(1<<20))}
		pass(time.Second) // it has filled the ring; the room that is left is too small for it
		for range 500 {   // until urgent data finds no room either
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
		e.before(func() { // the interrupt has left a signal that ends its first sleep
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

// A session that has sent only urgent data goes on handling messages after a WriteUrgent that found room
// as it was about to sleep: the peer's notes come while no Read or Write is in progress.
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
		e.before(func() { // there is no room or credit
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

// A WriteUrgent that waits ends when this end's direction is closed.
func TestAnUrgentWriteEndsWithItsDirection(t *testing.T) {
	for name, end := range map[string]func(*session.Session){
		"CloseWrite": func(s *session.Session) { s.CloseWrite() },
		"Close":      func(s *session.Session) { s.Close() },
		"Abort":      (*session.Session).Abort,
	} {
		inBubble(t, func(t *testing.T) {
			s, _, p := negotiated(t, messages, session.Config{}) // the peer grants no credit
			w := goWrite(s, pattern(1<<20))
			pass(time.Second)
			if r := within(t, goUrgent(s)); r.err != nil { // by a credit that is reserved for control
				t.Fatal(r.err)
			}
			u := goUrgent(s)
			waits(t, "WriteUrgent", u)
			for range session.ControlReserve { // the replies use up the other credits, so that no Shutdown is sent either
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
