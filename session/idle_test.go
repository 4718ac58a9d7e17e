package session_test

import (
	"bytes"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sanconn/san/session"
	"github.com/sanconn/san/session/twin"
)

// What comes when nobody is inside, and nobody was for a moment that matters.

// asked fails if the session does not answer a question soon, though nobody is inside.
func asked(t *testing.T, p *raw) {
	t.Helper()
	p.send(tPing, 0)
	p.expect(tPong)
}

// A Read that has waited for long uses up what the janitor had armed: the janitor looks
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

// What comes just before the janitor arms a session is seen by the look behind that, and
// what that makes due is said.
func TestComesAsTheJanitorLeaves(t *testing.T) {
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

// slowPoll is an endpoint on which a look takes long, once.
type slowPoll struct {
	*twin.Endpoint
	takes atomic.Int64 // ns
}

func (e *slowPoll) Poll(ev *session.Event) bool {
	nap(time.Duration(e.takes.Swap(0)))
	return e.Endpoint.Poll(ev)
}

// A session at which somebody looks just when the janitor comes is not forgotten.
func TestBusyWhenTheJanitorComes(t *testing.T) {
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

// What a Write leaves behind for want of room goes when there is some, of a session that
// the janitor had left too.
func TestBacklogOfAnIdleSession(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		cfg := messages
		cfg.SendQueue = session.ControlReserve + 2
		s, _, p := negotiated(t, cfg, session.Config{})
		pass(time.Minute)
		p.Hold(twin.HoldMessages)
		data := pattern(20_000)
		writeAll(t, s, data, 5000)
		pass(time.Minute)
		p.Hold(0)
		var got []byte
		for len(got) < len(data) {
			got = append(got, p.expect(tData)...)
		}
		if !bytes.Equal(got, data) {
			t.Error("wrong bytes")
		}
	})
}

// An outbox that finds no credit goes on when there is some.
func TestOutboxWaitsForCredit(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, boxed, session.Config{})
		in := p.open(s, 2<<20)
		var data []byte
		for s.Stats().Stalls == 0 { // the peer does not look
			if len(data) > 1<<20 {
				t.Fatal("there is no end of its credit")
			}
			b := pattern(boxed.Limits.Inbox)
			writeAll(t, s, b, len(b))
			pass(2 * latency)
			s.ReadUrgent(nil) // takes the completions, so that none comes behind the last
			data = append(data, b...)
		}
		pass(time.Minute)
		if got, _ := in.read(len(data)); !bytes.Equal(got, data) {
			t.Error("wrong bytes")
		}
	})
}

// An application that lives on what it has, and sends, does not look: the janitor does.
func TestActedOnWhileItLivesOnWhatItHas(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		const bound = 2*16*time.Millisecond + time.Millisecond // docs/ARCHITECTURE.md, When nobody is inside
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
			if took := time.Since(began); took > bound {
				t.Errorf("it answers after %v", took)
			}
		}
		<-over
	})
}

// … and on a ring, where one that sends need not wait and does not read: it hears of urgent
// data.
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

// longLook is an endpoint at which a look takes until the test lets it go on.
type longLook struct {
	*twin.Endpoint
	on          atomic.Bool
	begun, goOn chan struct{}
}

func (e *longLook) Poll(ev *session.Event) bool {
	if e.on.CompareAndSwap(true, false) {
		close(e.begun)
		<-e.goOn
	}
	return e.Endpoint.Poll(ev)
}

// However often a peer wakes a session while a look goes on, one goroutine is there to look
// behind that.
func TestWokenWhileItLooks(t *testing.T) {
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

// slowDisarm is an endpoint at which something happens before and behind a Disarm, once.
type slowDisarm struct {
	lateArm
	on            atomic.Bool
	ahead, behind func()
}

func (e *slowDisarm) Disarm(ev session.Events) {
	on := e.on.Swap(false)
	if on {
		e.ahead()
	}
	e.Endpoint.Disarm(ev)
	if on {
		e.behind()
	}
}

// A Write that ends takes back what it had armed, and not what a Read that begins just
// then has armed for itself, nor what that would be woken for.
func TestReadBeginsAsAWriteEnds(t *testing.T) {
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

// A Write leaves bytes for want of room, and the janitor has found the session idle since
// that Write began: they are sent when there is room.
func TestWriteWithoutRoomOfASessionGoneIdle(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		cfg := boxed
		cfg.Limits.Window = 64
		cfg.SendQueue = session.ControlReserve + 4
		s, _, p := negotiatedOn(t, cfg, session.Config{KeepAlive: -1}, withMemory(func(m session.Memory) session.Memory { return slowAlloc{m} }))
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
		if took := time.Since(there); took > time.Second/10 { // until the next look at whether the outbox is of use
			t.Errorf("what there was no room for is sent after %v", took)
		}
	})
}

// CloseRead of an idle session has something to say and no room for it: it is said when
// there is.
func TestCloseReadWithoutRoom(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		cfg := boxed
		cfg.Limits.Window = 64
		cfg.SendQueue = session.ControlReserve + 1
		s, _, p := negotiated(t, cfg, session.Config{KeepAlive: -1, ReceiveBudget: 10_000})
		p.ask()
		pass(2 * latency)
		p.send(tFill, 0, u64(10_000)...) // the inbox is full
		pass(2 * latency)
		p.Hold(twin.HoldMessages)
		for range cfg.SendQueue { // the answers fill the send queue
			if !p.send(tPing, 0) {
				t.Fatal("no room for a question")
			}
		}
		pass(time.Second) // idle
		if err := s.CloseRead(); err != nil {
			t.Fatal(err)
		}
		p.Hold(0)
		pass(time.Second)
		for m := p.recv(); m == nil || m[0] != tEmptied; m = p.recv() {
			if m == nil {
				t.Fatal("the peer does not hear that its inbox is empty")
			}
		}
	})
}
