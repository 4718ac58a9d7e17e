package session_test

import (
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/session"
)

// Keepalive finds a silent peer within four periods.
func TestKeepAliveFindsASilentPeer(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, b, ea, _ := pair(t, messages, session.Config{KeepAlive: 10 * time.Second})
		pass(time.Hour) // each end answers the other's Pings
		if _, err := a.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		readFull(t, b, 1)
		ea.Cut()
		began := time.Now()
		for _, s := range []*session.Session{a, b} {
			_, err := s.Read(make([]byte, 1))
			wantErr(t, "Read", err, syscall.ETIMEDOUT)
		}
		if took := time.Since(began); took < 30*time.Second || took > 60*time.Second {
			t.Errorf("it took %v", took)
		}
	})
}

// A peer gets three Pings, an interval apart, before the connection is given up.
func TestKeepAliveSendsThreePings(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, messages, session.Config{KeepAlive: time.Second})
		r := goRead(s, make([]byte, 1))
		pass(time.Minute)
		wantErr(t, "Read", within(t, r).err, syscall.ETIMEDOUT)
		asked := 0
		for m := p.recv(); m != nil; m = p.recv() {
			if m[0] == tPing {
				asked++
			}
		}
		if asked != 3 {
			t.Errorf("it was asked %d times, want 3", asked)
		}
	})
}

// Keepalive counts Pings in a row without a Pong.
func TestKeepAliveCountsInARow(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, messages, session.Config{KeepAlive: time.Second})
		for range 10 {
			pass(3 * time.Second / 2) // expect waits for the first Ping; at the first look none is sent
			p.expect(tPing)           // this one is not answered
			pass(time.Second / 2)
			p.expect(tPing)
			p.send(tPong, 0)
		}
		if _, err := s.WriteUrgent([]byte("alive")); err != nil {
			t.Error(err)
		}
	})
}

// An interval counts from the time at which it is set, and is kept when keepalive is switched off and on
// again.
func TestAKeepAlivePeriodCountsFromThenOn(t *testing.T) {
	for _, again := range []bool{false, true} {
		inBubble(t, func(t *testing.T) {
			a, _, ea, _ := pair(t, messages, session.Config{KeepAlive: time.Hour})
			ea.Cut()
			const interval = 2 * time.Second
			a.KeepAlivePeriod(interval)
			if again {
				a.KeepAliveOn(false)
				a.KeepAliveOn(true)
			}
			began := time.Now()
			wantErr(t, "Read", within(t, goRead(a, make([]byte, 1))).err, syscall.ETIMEDOUT)
			if took := time.Since(began); took < 3*interval || took > 5*interval {
				t.Errorf("the end came after %v, with questions each %v", took, interval)
			}
		})
	}
}

// A period below a second, as of a caller who has forgotten the unit, counts as a second, as in the
// kernel's TCP. So a live peer has time to answer.
func TestAKeepAlivePeriodIsASecondAtLeast(t *testing.T) {
	for _, configured := range []time.Duration{time.Hour, 30} {
		inBubble(t, func(t *testing.T) {
			a, b, _, _ := pair(t, messages, session.Config{KeepAlive: configured})
			if configured == time.Hour {
				a.KeepAlivePeriod(30)
			}
			pass(time.Minute)
			if _, err := b.Write([]byte("x")); err != nil {
				t.Fatal(err)
			}
			readFull(t, a, 1)
		})
	}
}

// Without keepalive a silent peer is not found. It is once keepalive is switched on.
func TestKeepAliveMayBeOff(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, _, ea, _ := pair(t, messages, session.Config{KeepAlive: -1})
		ea.Cut()
		r := goRead(a, make([]byte, 1))
		select {
		case x := <-r:
			t.Errorf("Read: %+v", x)
		case <-time.After(24 * time.Hour):
		}
		a.KeepAlivePeriod(time.Second)
		a.KeepAliveOn(true)
		wantErr(t, "Read", within(t, r).err, syscall.ETIMEDOUT)
	})
}

// Keepalive that is switched on again has the interval that it had, or the default if it was off from
// the start.
func TestKeepAliveOnAgainHasItsPeriod(t *testing.T) {
	for _, c := range []struct{ configured, interval time.Duration }{
		{2 * time.Second, 2 * time.Second},
		{-1, 15 * time.Second},
	} {
		inBubble(t, func(t *testing.T) {
			a, _, ea, _ := pair(t, messages, session.Config{KeepAlive: c.configured})
			ea.Cut()
			a.KeepAliveOn(false)
			r := goRead(a, make([]byte, 1))
			select {
			case x := <-r:
				t.Errorf("Read: %+v", x)
			case <-time.After(24 * time.Hour):
			}
			a.KeepAlivePeriod(-1) // the interval stays as it was
			a.KeepAliveOn(true)
			began := time.Now()
			wantErr(t, "Read", within(t, r).err, syscall.ETIMEDOUT)
			if took := time.Since(began); took < 3*c.interval || took > 5*c.interval {
				t.Errorf("the end came after %v, with questions each %v", took, c.interval)
			}
		})
	}
}

// Keepalive does not replace the cause of an end that no call has returned yet.
func TestKeepAliveEndsWithTheConnection(t *testing.T) {
	for what, end := range map[string]func(*session.Session){
		"Abort":        (*session.Session).Abort,
		"unread Close": func(s *session.Session) { s.Close() },
	} {
		inBubble(t, func(t *testing.T) {
			a, b, _, _ := pair(t, messages, session.Config{KeepAlive: time.Second})
			writeAll(t, a, []byte("unread there"), 12)
			pass(time.Second / 10)
			end(b)
			pass(time.Minute)
			_, err := a.Read(make([]byte, 1))
			wantErr(t, what, err, syscall.ECONNRESET)
		})
	}
}

// When keepalive finds the peer dead, the layer above is notified, even if no operation is in progress.
func TestKeepAliveTellsTheEnd(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		scfg, notes := noted()
		scfg.KeepAlive = time.Second
		_, _, p := negotiated(t, messages, scfg)
		p.Cut()
		pass(time.Minute)
		select {
		case n := <-notes:
			if len(n) > 0 {
				t.Errorf("a note: %q", n)
			}
		default:
			t.Error("the end is not told")
		}
	})
}
