package session_test

import (
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/session"
)

// D3: messages are acted on even if the application does not read.
func TestActedOnWhileNobodyReads(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		_, _, p := negotiated(t, byRead, session.Config{KeepAlive: -1})
		pass(time.Hour) // the idle poller has stopped looking long ago
		p.send(tPing, 0)
		p.expect(tPong)
		p.send(tUrgent, 0, 'u')
		p.send(tPing, 0)
		p.expect(tPong)
	})
}

// actedOnWithin is the longest time until a message is acted on in a session in which no operation is.
const actedOnWithin = 2*16*time.Millisecond + time.Millisecond // docs/ARCHITECTURE.md, When nobody is inside

// offerInTime fails if an offered Write to a peer that does not read takes longer than actedOnWithin.
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

// thereAndBack keeps both ends busy for the given time.
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

// If an application begins to compute after a busy spell, an offer to it waits for two ticks of the idle
// poller at most.
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

// The same if the application reads, piece by piece, bytes that came long ago, and answers.
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

// A Read that has waited long uses up the wake-up that the idle poller had armed. The idle poller looks
// at the session again afterwards.
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

// Reads of bytes that came before, and Writes with credit, do not poll. The idle poller does.
func TestActedOnWhileReadsNeedNoPoll(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		const all = 300
		cfg := messages
		cfg.Limits.Window, cfg.SendQueue = 2*all, 2*all // the application does not wait for credit
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

// On a ring a Write that has room does not poll. Urgent data is found by the idle poller.
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

// What comes just before the idle poller arms a session is found by its poll after that, and what is due
// then is sent.
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
				for range 12 { // they cost credit, and cause no reply that would bring the credit back
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
			p.Hold(twin.HoldMessages) // messages on their way to the peer stay in the session's queue
			for range cfg.SendQueue {
				if !p.send(tPing, 0) { // the replies fill it
					t.Fatal("no room for a question")
				}
			}
			pass(time.Millisecond)
			e.before(func() {
				p.send(tPing, 0)
				nap(2 * latency)
				e.before(func() { // this Arm is for room, as there is none for the reply
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

// A session that another goroutine polls just when the idle poller comes stays with the idle poller.
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

// However often a peer wakes a session during a poll, only one goroutine is started that polls
// afterwards.
func TestWakesDuringAPollStartOneGoroutine(t *testing.T) {
	ea, eb := twins(t, ring)
	e := &longLook{Endpoint: ea, begun: make(chan struct{}), goOn: make(chan struct{})}
	a, b := session.New(e, session.Config{}), session.New(eb, session.Config{})
	negotiate(t, a)
	negotiate(t, b)
	e.on.Store(true)
	go a.ReadUrgent(nil) // polls
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

// A Write that ends disarms what it had armed itself, but not what a Read that begins just then has
// armed, and the Read gets its wake-up.
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
				e.before(func() { // as the Write is about to sleep
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

// An idle connection costs nothing: no polling and no timer.
func TestIdleCostsNothing(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		a, b, ea, eb := pair(t, byRead, session.Config{KeepAlive: -1})
		if _, err := a.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		readFull(t, b, 1)
		r := goRead(b, make([]byte, 1)) // a call waits at one end, none at the other
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

// A Write has left bytes in the send buffer for lack of room, and the idle poller has found the session
// idle since. The bytes are sent when there is room.
func TestTheSendBufferOfASessionGoneIdleGoesLater(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		cfg := buffered
		cfg.Limits.Window = 64
		cfg.SendQueue = session.ControlReserve + 4
		s, _, p := negotiatedOn(t, cfg, session.Config{KeepAlive: -1}, withMemory(inThreeSeconds))
		p.open(s, 100_000)
		p.Hold(twin.HoldMessages)
		writeAll(t, s, pattern(400), 100) // the send queue is full
		pass(300 * time.Millisecond)      // and the session is idle
		writeAll(t, s, pattern(20_000), 20_000)
		p.Hold(0)
		there := time.Now()
		for range 4 {
			p.expect(tData)
		}
		p.expect(tFill)
		if took := time.Since(there); took > time.Second/10 { // otherwise they are sent when the idle poller next looks whether the send buffer is in use
			t.Errorf("what there was no room for is sent after %v", took)
		}
	})
}

// Shutdown and Close that find no room in the ring, of a session at which the idle poller has stopped
// looking, are sent when there is room.
func TestShutdownWithoutRoomIsSentLater(t *testing.T) {
	t.Run("CloseWrite", func(t *testing.T) { withoutRoom(t, (*session.Session).CloseWrite, tShutdown) })
	t.Run("Close", func(t *testing.T) { withoutRoom(t, (*session.Session).Close, tClose) })
}

func withoutRoom(t *testing.T, end func(*session.Session) error, said byte) {
	writes, pongs := -1, -1 // how many fill the ring up to control's share, and then that share
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
					pongs = n // this one could not be sent; in the second run none is left over
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

// asked fails if the session does not answer a Ping while no operation is in it.
func asked(t *testing.T, p *raw) {
	t.Helper()
	p.send(tPing, 0)
	p.expect(tPong)
}
