package session_test

import (
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/session"
)

// D3: messages are acted on though the application does not read.
func TestActedOnWhileNobodyReads(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		_, _, p := negotiated(t, byRead, session.Config{KeepAlive: -1})
		pass(time.Hour) // the session has gone to sleep long ago
		p.send(tPing, 0)
		p.expect(tPong)
		p.send(tUrgent, 0, 'u')
		p.send(tPing, 0)
		p.expect(tPong)
	})
}

// actedOnWithin is how long a message waits for a session that nobody polls.
const actedOnWithin = 2*16*time.Millisecond + time.Millisecond // docs/ARCHITECTURE.md, When nobody is inside

// offerInTime writes what is offered to a peer that does not read.
func offerInTime(t *testing.T, s *session.Session) {
	t.Helper()
	began := time.Now()
	if _, err := s.Write(make([]byte, offered)); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took > actedOnWithin {
		t.Errorf("a peer that computes has answered after %v, want %v at most", took, actedOnWithin)
	}
}

const offered = 64 << 10

// thereAndBack keeps both ends busy for a spell.
func thereAndBack(t *testing.T, a, b *session.Session, spell time.Duration) {
	t.Helper()
	for began := time.Now(); time.Since(began) < spell; {
		for _, s := range [][2]*session.Session{{a, b}, {b, a}} {
			if _, err := s[0].Write([]byte("x")); err != nil {
				t.Fatal(err)
			}
			readFull(t, s[1], 1)
		}
	}
}

// An offer to an application that has begun to compute, in the middle of a busy spell,
// waits for two ticks of the idle poller at most.
func TestActedOnBehindABusySpell(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, b, _, _ := pair(t, byRead, session.Config{KeepAlive: -1})
		for spell := 60 * time.Millisecond; spell <= 76*time.Millisecond; spell += 2 * time.Millisecond {
			thereAndBack(t, a, b, spell)
			offerInTime(t, a)
			readFull(t, b, offered)
		}
	})
}

// … and so does one to an application that reads little by little what has come long
// ago, and answers.
func TestActedOnBehindWhatCameLongAgo(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, b, _, _ := pair(t, byRead, session.Config{KeepAlive: -1})
		thereAndBack(t, a, b, 60*time.Millisecond)
		if _, err := a.Write(make([]byte, 1000)); err != nil {
			t.Fatal(err)
		}
		const pieces = 200
		var both sync.WaitGroup
		both.Go(func() {
			for n, err := 0, error(nil); n < pieces && err == nil; {
				var k int
				k, err = a.Read(make([]byte, 10))
				n += k
			}
		})
		both.Go(func() {
			for range pieces {
				b.Read(make([]byte, 1))
				b.Write([]byte("x"))
				nap(10 * time.Millisecond)
			}
		})
		pass(105 * time.Millisecond)
		offerInTime(t, a)
		both.Wait()
	})
}

// A Read that has waited for long uses up what the idle poller had armed: the idle poller looks
// after the session again.
func TestActedOnBehindAReadThatWaited(t *testing.T) {
	for name, cfg := range map[string]twin.Config{"messages": messages, "ring": ring} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				s, _, p := negotiated(t, cfg, session.Config{})
				r := goRead(s, make([]byte, 10))
				pass(time.Minute)
				p.send(tData, 0, 'x')
				if x := within(t, r); x.n != 1 || x.err != nil {
					t.Fatalf("Read: %+v", x)
				}
				asked(t, p)
			})
		})
	}
}

// An application that reads what had come before, and sends, does not poll: the idle poller
// does.
func TestActedOnWhileReadsNeedNoPoll(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		const all = 300
		cfg := messages
		cfg.Limits.Window, cfg.SendQueue = 2*all, 2*all // it does not wait for credit
		s, _, p := negotiated(t, cfg, session.Config{})
		p.send(tData, 0, pattern(all)...)
		pass(10 * time.Millisecond)
		over := make(chan struct{})
		go func() {
			defer close(over)
			for range all {
				s.Read(make([]byte, 1))
				s.Write([]byte("x"))
				nap(time.Millisecond)
			}
		}()
		for range 3 {
			pass(50 * time.Millisecond)
			began := time.Now()
			p.send(tPing, 0)
			for m := p.recv(); m == nil || m[0] != tPong; m = p.recv() {
				if m == nil {
					t.Fatal("no answer")
				}
			}
			if took := time.Since(began); took > actedOnWithin {
				t.Errorf("it answers after %v", took)
			}
		}
		<-over
	})
}

// On a ring, where a Write need not wait and does not poll, urgent data is found by the
// idle poller.
func TestActedOnWhileItSends(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		const bound = 2*32*time.Millisecond + time.Millisecond // docs/ARCHITECTURE.md, When nobody is inside
		s, _, p := negotiated(t, ring, session.Config{})
		over := make(chan struct{})
		go func() {
			defer close(over)
			for range 500 {
				if _, err := s.Write([]byte("x")); err != nil {
					t.Error(err)
				}
				nap(time.Millisecond)
			}
		}()
		pass(200 * time.Millisecond)
		began := time.Now()
		p.send(tUrgent, 0, 'u')
		<-s.Urgent()
		if took := time.Since(began); took > bound {
			t.Errorf("it is acted on after %v", took)
		}
		<-over
	})
}

// What comes just before the idle poller arms a session is found by its poll after that,
// and what becomes due is sent.
func TestNothingIsMissedAsTheIdlePollerLeaves(t *testing.T) {
	begin := func(t *testing.T, cfg twin.Config) (*lateArm, *raw) {
		e := &lateArm{}
		_, _, p := negotiatedOn(t, cfg, session.Config{}, func(under *twin.Endpoint) session.Endpoint {
			e.Endpoint = under
			return e
		})
		return e, p
	}
	t.Run("credit", func(t *testing.T) {
		inBubble(t, func(t *testing.T) {
			e, p := begin(t, messages)
			e.before(func() {
				for range 12 { // cost credit, and want no answer that would bring it
					p.send(tPong, 0)
				}
				nap(2 * latency)
			})
			p.expect(tCredit)
		})
	})
	t.Run("room", func(t *testing.T) {
		inBubble(t, func(t *testing.T) {
			cfg := messages
			cfg.SendQueue = session.ControlReserve + 1
			e, p := begin(t, cfg)
			pass(2 * latency)
			p.Hold(twin.HoldMessages) // what is under way to the peer stays in the session's queue
			for range cfg.SendQueue {
				if !p.send(tPing, 0) { // the answers fill it
					t.Fatal("no room for a question")
				}
			}
			pass(time.Millisecond)
			e.before(func() {
				p.send(tPing, 0)
				nap(2 * latency)
				e.before(func() { // as there is no room for the answer
					p.Hold(0)
					nap(3 * latency)
				})
			})
			pass(time.Second)
			for range cfg.SendQueue + 1 {
				p.expect(tPong)
			}
		})
	})
}

// A session that somebody polls just when the idle poller comes is not forgotten.
func TestASessionThatIsPolledAsTheIdlePollerComesIsKept(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		e := &slowPoll{}
		s, _, p := negotiatedOn(t, messages, session.Config{}, func(under *twin.Endpoint) session.Endpoint {
			e.Endpoint = under
			return e
		})
		for range 3 {
			e.takes.Store(int64(50 * time.Millisecond))
			s.ReadUrgent(nil)
			pass(time.Second)
			asked(t, p)
		}
	})
}

// However often a peer wakes a session during a poll, one goroutine is there to poll
// afterwards.
func TestWakesDuringAPollStartOneGoroutine(t *testing.T) {
	ea, eb := twins(t, ring)
	e := &longLook{Endpoint: ea, begun: make(chan struct{}), goOn: make(chan struct{})}
	a, b := session.New(e, session.Config{}), session.New(eb, session.Config{})
	negotiate(t, a)
	negotiate(t, b)
	e.on.Store(true)
	go a.ReadUrgent(nil) // looks
	<-e.begun
	const wakes = 1000
	before := runtime.NumGoroutine()
	for range wakes {
		a.Wake(session.RecvReady)
		runtime.Gosched()
	}
	if more := runtime.NumGoroutine() - before; more > wakes/100 {
		t.Errorf("%d more goroutines", more)
	}
	close(e.goOn)
	for _, s := range []*session.Session{a, b} {
		s.Abort()
		<-s.Closed()
	}
}

// A Write that ends disarms what it had armed, and not what a Read that begins just
// then has armed for itself, nor what that would be woken for.
func TestAReadThatBeginsAsAWriteEndsIsWoken(t *testing.T) {
	for name, early := range map[string]bool{"and it comes at once": true, "and it comes later": false} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				e := &slowDisarm{}
				s, _, p := negotiatedOn(t, messages, session.Config{SendBudget: 1}, func(under *twin.Endpoint) session.Endpoint {
					e.Endpoint = under
					return e
				})
				var r <-chan result
				say := func() {
					p.send(tData, 0, 'x')
					nap(2 * latency)
				}
				e.ahead = func() {
					r = goRead(s, make([]byte, 1))
					nap(latency)
				}
				e.behind = func() {
					if early {
						say()
					}
				}
				e.before(func() { // as it is about to sleep
					e.on.Store(true)
					s.InterruptWrite(true)
				})
				w := goWrite(s, pattern(1<<20))
				wantErr(t, "Write", within(t, w).err, session.ErrInterrupted)
				if !early {
					say()
				}
				select {
				case x := <-r:
					if x.n != 1 || x.err != nil {
						t.Errorf("Read: %+v", x)
					}
				case <-time.After(latency):
					t.Error("the Read is not woken")
				}
			})
		})
	}
}

// An idle connection does nothing at all: no polling, no timer.
func TestIdleCostsNothing(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, b, ea, eb := pair(t, byRead, session.Config{KeepAlive: -1})
		if _, err := a.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		readFull(t, b, 1)
		r := goRead(b, make([]byte, 1)) // one end waits, the other does nothing
		pass(time.Second)
		before := ea.Calls() + eb.Calls()
		pass(24 * time.Hour)
		if after := ea.Calls() + eb.Calls(); after != before {
			t.Errorf("%d calls into the endpoints in an idle day", after-before)
		}
		if _, err := a.Write([]byte("y")); err != nil {
			t.Fatal(err)
		}
		if got := within(t, r); got.n != 1 || got.err != nil {
			t.Errorf("Read after a day: %+v", got)
		}
	})
}

// A Write leaves bytes for want of room, and the idle poller has found the session idle
// since that Write began: they are sent when there is room.
func TestTheSendBufferOfASessionGoneIdleGoesLater(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		cfg := buffered
		cfg.Limits.Window = 64
		cfg.SendQueue = session.ControlReserve + 4
		s, _, p := negotiatedOn(t, cfg, session.Config{KeepAlive: -1}, withMemory(inThreeSeconds))
		p.open(s, 100_000)
		p.Hold(twin.HoldMessages)
		writeAll(t, s, pattern(400), 100) // the send queue is full
		pass(300 * time.Millisecond)      // and the session idle
		writeAll(t, s, pattern(20_000), 20_000)
		p.Hold(0)
		there := time.Now()
		for range 4 {
			p.expect(tData)
		}
		p.expect(tFill)
		if took := time.Since(there); took > time.Second/10 { // until the next look at whether the send buffer is of use
			t.Errorf("what there was no room for is sent after %v", took)
		}
	})
}

// Shutdown and Close that find no room in the ring, of a session that the idle poller has
// left, go when there is some.
func TestShutdownWithoutRoomIsSentLater(t *testing.T) {
	t.Run("CloseWrite", func(t *testing.T) { withoutRoom(t, (*session.Session).CloseWrite, tShutdown) })
	t.Run("Close", func(t *testing.T) { withoutRoom(t, (*session.Session).Close, tClose) })
}

func withoutRoom(t *testing.T, end func(*session.Session) error, said byte) {
	writes, pongs := -1, -1 // that fill the ring up to control's share, and that too
	for range 2 {
		inBubble(t, func(t *testing.T) {
			cfg := ring
			cfg.QueueBytes = 8 << 10
			s, _, p := negotiated(t, cfg, session.Config{})
			for n := 0; n != writes; n++ {
				w := goWrite(s, make([]byte, 100))
				pass(time.Second)
				s.InterruptWrite(true)
				if r := within(t, w); r.err != nil {
					writes = n
					break
				}
				s.InterruptWrite(false)
			}
			s.InterruptWrite(false)
			for n := 0; n != pongs; n++ {
				before := s.Stats().MessagesSent
				p.send(tPing, 0)
				pass(time.Second)
				if s.Stats().MessagesSent == before {
					pongs = n // now one is owed: the second time there is not
					return
				}
			}
			before := s.Stats().MessagesSent
			if err := end(s); err != nil {
				t.Fatal(err)
			}
			if s.Stats().MessagesSent != before {
				t.Fatal("there was room")
			}
			for {
				m := p.recv()
				if m == nil {
					t.Fatalf("no message of type %d comes, though there is room", said)
				}
				if m[0] == said {
					return
				}
			}
		})
	}
	if writes <= 0 || pongs <= 0 {
		t.Errorf("%d Writes and %d Pongs fill the ring", writes, pongs)
	}
}

// requested fails if the session does not answer a Ping, though nobody is inside.
func asked(t *testing.T, p *raw) {
	t.Helper()
	p.send(tPing, 0)
	p.expect(tPong)
}
