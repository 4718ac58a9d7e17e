package session_test

import (
	"testing"
	"time"

	"github.com/sanconn/san/internal/spin"
	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/session"
)

// timedLook is an endpoint on which Err takes a millisecond, so that virtual time passes for a Write
// that polls.
type timedLook struct{ *twin.Endpoint }

func (e timedLook) Err() error {
	nap(time.Millisecond)
	return e.Endpoint.Err()
}

// polled runs f in a bubble in which waits may poll, whatever slow yields there were before.
func polled(t *testing.T, f func(*testing.T)) {
	for began, w := time.Now(), new(spin.Wait); ; {
		if w.Begin(new(spin.History), time.Hour) {
			w.End()
			break
		}
		if time.Since(began) > time.Minute {
			t.Fatal("nobody may poll")
		}
	}
	inBubble(t, f)
}

// polls is how long the waits of these tests poll.
const polls = 100 * time.Millisecond

// A wait goes on polling as long as bytes move, each time for its polling time. When none have moved for
// that long, it sleeps, and polls again when bytes move.
func TestAWaitPollsWhileBytesMove(t *testing.T) {
	polled(t, func(t *testing.T) {
		s, _, _, _ := pair(t, byRead, session.Config{Spin: -1})
		s.SetSpin(polls)
		looks, after, slept := 0, 0, s.Stats().Sleeps
		const moves = 400 // bytes move during so many looks
		s.Await(func() bool {
			nap(time.Millisecond)
			looks++
			n := s.Stats().Sleeps - slept
			switch {
			case looks < moves && n > 0:
				t.Errorf("it sleeps after %d looks", looks)
				return false
			case looks < moves && looks%60 == 0:
				s.Move()
			case looks == moves:
				for i := range 2 { // twice, because the wait after one that polled in vain does not poll
					time.AfterFunc(time.Duration(1+i)*time.Second, func() { s.Move(); s.WakeRead() })
				}
			}
			if n == 2 {
				after++
			}
			return after < 50 // less than its polling time
		})
		if n := s.Stats().Sleeps - slept; n != 2 || after < 50 {
			t.Errorf("%d looks, and it slept %d times", looks, n)
		}
		if s.Stats().Polls == 0 {
			t.Error("the last wait did not end by polling")
		}
	})
}

// A completed RDMA read counts as a move of bytes, and so does a message of the peer about what it has
// taken.
func TestWhatMovesIsCounted(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, b, _, _ := pair(t, inPieces(byRead), session.Config{})
		data := pattern(60_000)
		r := goRead(b, make([]byte, len(data)))
		pass(time.Second)
		if x := within(t, goWrite(a, data)); x.n != len(data) || x.err != nil {
			t.Fatalf("Write: %+v", x)
		}
		within(t, r)
		if n := b.Moved(); n < 6 {
			t.Errorf("%d reads of 6 are counted", n)
		}
		if n := a.Moved(); n < 2 {
			t.Errorf("%d messages are counted, of ReadDone and NearDone", n)
		}
	})
}

// A Write whose offer takes long sleeps without polling, and polls once the peer has sent NearDone.
func TestAWriteSleepsUntilTheEndIsNear(t *testing.T) {
	polled(t, func(t *testing.T) {
		s, _, p := negotiatedOn(t, inPieces(byRead), session.Config{KeepAlive: -1, Spin: -1}, func(e *twin.Endpoint) session.Endpoint { return timedLook{e} })
		s.SetSpin(polls) // not before: no time would pass for a Negotiate that polls
		data, before := pattern(60_000), s.Stats()
		w := goWrite(s, data)
		d := p.expect(tOfferRead)
		pass(polls / 4)
		if n := s.Stats().Sleeps - before.Sleeps; n != 1 {
			t.Fatalf("it slept %d times at the beginning", n)
		}
		p.send(tNearDone, 0)
		pass(polls / 4)
		n := descriptor(d[8:]).Len
		p.send(tReadDone, 0, u64(uint64(le.Uint32(d)), n)...)
		if r := within(t, w); r.n != len(data) || r.err != nil {
			t.Errorf("Write: %+v", r)
		}
		after := s.Stats()
		if after.Sleeps-before.Sleeps != 1 || after.Polls-before.Polls != 1 {
			t.Errorf("it slept %d times, and %d waits ended by polling", after.Sleeps-before.Sleeps, after.Polls-before.Polls)
		}
	})
}

// The reader of an offer sends NearDone after each of the last RDMA reads but the very last, and none
// for a short offer.
func TestTheReaderTellsThatTheEndIsNear(t *testing.T) {
	for size, want := range map[int]int{10_000: 0, 40_000: 3, 90_000: 3} {
		inBubble(t, func(t *testing.T) {
			s, _, p := negotiated(t, inPieces(byRead), session.Config{KeepAlive: -1})
			readOffer(t, s, p, size)
			told := 0
			for m := p.recv(); m == nil || m[0] != tReadDone; m = p.recv() {
				if m == nil {
					t.Fatal("no ReadDone")
				}
				if m[0] == tNearDone {
					told++
				}
			}
			if told != want {
				t.Errorf("of %d bytes it told %d times, want %d", size, told, want)
			}
		})
	}
}

// While there is no credit, one NearDone waits for it, even if several are due.
func TestOneNearDoneWaitsForCredit(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		const size = 40_000
		s, _, p := negotiated(t, inPieces(byRead), session.Config{KeepAlive: -1})
		credits := byRead.Limits.Window - session.ControlReserve
		for range credits {
			p.send(tPing, 0)
			pass(time.Millisecond)
		}
		readOffer(t, s, p, size)
		for range credits {
			p.expect(tPong)
		}
		p.send(tCredit, 0)
		p.expect(tNearDone)
		p.expect(tReadDone)
	})
}

// readOffer makes a Read take a whole offer of the raw peer. The Read's slice begins where one of
// inPieces' blocks of memory begins, so that the number of RDMA reads is known.
func readOffer(t *testing.T, s *session.Session, p *raw, size int) {
	t.Helper()
	d, err := p.Expose(pattern(size), session.RemoteRead)
	if err != nil {
		t.Fatal(err)
	}
	const block = 10_000
	into := make([]byte, size+block)
	into = into[(block-address(into)%block)%block:][:size]
	r := goRead(s, into)
	p.send(tOfferRead, 0, u64(1, d.Addr, d.Key, d.Len)...)
	if r := within(t, r); r.n != size || r.err != nil {
		t.Fatalf("Read: %+v", r)
	}
}
