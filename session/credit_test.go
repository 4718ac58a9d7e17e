package session_test

import (
	"bytes"
	"testing"
	"time"

	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/session"
)

// Control messages cost credit too: a peer that grants none gets as many as it has receive buffers for,
// and the rest when it grants more.
func TestControlKeepsToItsCredit(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		_, _, p := negotiated(t, messages, session.Config{KeepAlive: -1})
		p.dropped = 0
		pongs := func() (n int) {
			for {
				m := p.recv()
				if m == nil {
					return n
				}
				p.dropped = 0 // so that no message grants credit
				if m[0] == tPong {
					n++
				}
			}
		}
		granted := messages.Limits.Window - session.ControlReserve
		for range granted + 5 {
			if !p.send(tPing, 0) {
				pass(time.Millisecond)
			}
			pass(time.Millisecond)
		}
		if got := pongs(); got != granted-1 { // Negotiate used one
			t.Errorf("%d answers with %d credits, one of them used", got, granted)
		}
		p.dropped = uint32(granted)
		p.send(tCredit, 0)
		p.dropped = 0
		if got := pongs(); got != 6 {
			t.Errorf("%d answers after credit was given, want 6", got)
		}
	})
}

// Control messages leave a credit for a lent message, which is sent when the loan ends.
func TestControlLeavesALoanItsCredit(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, messages, session.Config{KeepAlive: -1})
		p.dropped = 0
		if _, err := s.Reserve(100); err != nil {
			t.Fatal(err)
		}
		granted := messages.Limits.Window - session.ControlReserve
		for range granted + 5 {
			p.send(tPing, 0)
			pass(time.Millisecond)
		}
		if err := s.Commit(100); err != nil {
			t.Fatal(err)
		}
		came := 0
		for m := p.recv(); m != nil; m = p.recv() {
			p.dropped = 0 // so that no message grants credit
			came++
		}
		if came != granted-1 { // Negotiate used one
			t.Errorf("%d messages with %d credits, one of them used", came, granted)
		}
	})
}

// Data leaves the credits that are reserved for control messages, which must get through while data
// waits.
func TestDataLeavesControlItsCredit(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, messages, session.Config{KeepAlive: -1})
		granted := messages.Limits.Window - session.ControlReserve
		goWrite(s, pattern(1<<20))
		data := 0
		for m := p.recv(); m != nil; m = p.recv() {
			p.dropped = 0 // so that no message grants credit
			if m[0] == tData {
				data++
			}
		}
		if want := granted - 1 - session.ControlReserve; data != want { // Negotiate used one
			t.Errorf("%d messages of data with %d credits, one of them used; want %d", data, granted, want)
		}
	})
}

// A control message that becomes due while no Read or Write is in progress, and for which there is no
// room, is sent as soon as there is room.
func TestControlThatFindsNoRoomGoesLater(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		const cost = 8                                                       // in the ring for each message, in addition to its bytes
		const reserve = session.ControlReserve * (session.MaxControl + cost) // that data leaves free
		cfg := ring
		cfg.QueueBytes = 4*(cfg.Limits.MaxMessage+cost) + reserve + cost
		s, _, p := negotiated(t, cfg, session.Config{})
		w := goWrite(s, pattern(1<<20))
		pass(time.Second)
		s.InterruptWrite(true)
		within(t, w)
		p.send(tData, 0, 1) // this and the next Data use up what the session was armed for, so that only the idle poller looks
		p.expect(tData)
		pass(10 * latency)
		s.InterruptWrite(false)
		writeAll(t, s, pattern(cfg.Limits.MaxMessage-header), cfg.Limits.MaxMessage) // the ring is full again
		const asked = reserve/(header+cost) + session.ControlReserve
		for range asked {
			if !p.send(tPing, 0) {
				t.Fatal("no room for a question")
			}
		}
		pass(time.Minute)
		pongs := 0
		for m := p.recv(); m != nil; m = p.recv() {
			if m[0] == tPong {
				pongs++
			}
		}
		if pongs != asked {
			t.Errorf("%d answers to %d questions", pongs, asked)
		}
	})
}

// If a control message becomes due by a Read's last poll before it sleeps, and there is no room for it,
// the Read waits for room too.
func TestControlDueBeforeSleepWaitsForRoom(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		cfg := messages
		cfg.SendQueue = session.ControlReserve + 1
		e := &lateArm{}
		s, _, p := negotiatedOn(t, cfg, session.Config{KeepAlive: -1}, func(inner *twin.Endpoint) session.Endpoint {
			e.Endpoint = inner
			return e
		})
		pass(2 * latency)
		p.Hold(twin.HoldMessages) // messages on their way to the peer stay in the session's queue
		for range cfg.SendQueue { // the replies fill it
			if !p.send(tPing, 0) {
				t.Fatal("no room for a question")
			}
		}
		pass(2 * latency)
		asked := make(chan struct{})
		e.before(func() {
			p.send(tPing, 0)
			nap(2 * latency) // it arrives before a wake-up for it is armed
			close(asked)
		})
		goRead(s, make([]byte, 1))
		<-asked
		pass(2 * latency)
		began := time.Now()
		p.Hold(0)
		for range cfg.SendQueue + 1 {
			p.expect(tPong)
		}
		if took := time.Since(began); took > time.Millisecond { // otherwise the idle poller would send it at its next tick
			t.Errorf("it came %v after there was room", took)
		}
	})
}

// A control message that is due while a Read waits for its own transfer, and for which there is no room
// or credit, is sent as soon as there is: only the Read polls.
func TestControlOfADirectReadGoesLater(t *testing.T) {
	for name, exhaust := range map[string]func(*raw) (again func()){
		"room": func(p *raw) func() {
			p.Hold(twin.HoldMessages) // messages on their way to the peer stay in the session's queue
			p.ping(shortQueue.SendQueue)
			return func() { p.Hold(0); p.expectPongs(shortQueue.SendQueue) }
		},
		"credit": func(p *raw) func() {
			credits := shortQueue.Limits.Window - session.ControlReserve
			p.ping(credits)
			return func() { p.expectPongs(credits); p.send(tCredit, 0) }
		},
	} {
		t.Run("ReadDone without "+name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) { doneGoesLater(t, exhaust) })
		})
	}
}

var shortQueue = func() twin.Config {
	cfg := byRead
	cfg.SendQueue = session.ControlReserve + 1
	return cfg
}()

func (p *raw) ping(n int) {
	for range n {
		p.send(tPing, 0)
		pass(time.Millisecond)
	}
}

func (p *raw) expectPongs(n int) {
	for range n {
		p.expect(tPong)
	}
}

// expectSoon calls again, which makes room or credit, and expects a message promptly after it.
func (p *raw) expectSoon(typ byte, again func()) []byte {
	p.t.Helper()
	pass(time.Second)
	began := time.Now()
	again()
	b := p.expect(typ)
	if took := time.Since(began); took > time.Millisecond {
		p.t.Errorf("it came %v after there was some", took)
	}
	return b
}

// doneGoesLater lets a Read receive an offer directly while there is no room or credit for its ReadDone.
func doneGoesLater(t *testing.T, exhaust func(*raw) (again func())) {
	s, _, p := negotiated(t, shortQueue, session.Config{KeepAlive: -1})
	data, into := pattern(200_000), make([]byte, 200_000)
	r := goRead(s, into)
	pass(time.Second)
	again := exhaust(p)
	d, err := p.Expose(data, session.RemoteRead)
	if err != nil {
		t.Fatal(err)
	}
	p.send(tOfferRead, 0, u64(1, d.Addr, d.Key, d.Len)...)
	p.expectSoon(tReadDone, again)
	if x := within(t, r); x.n != len(into) || x.err != nil || !bytes.Equal(into, data) {
		t.Errorf("Read: %+v", x)
	}
}

// Credit that a Read owes for what it took before a transfer into its own slice is sent before that
// transfer ends.
func TestCreditDoesNotWaitForADirectRead(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		cfg := byRead
		cfg.SendQueue = 40
		s, e, p := negotiated(t, cfg, session.Config{KeepAlive: -1})
		data := pattern(100_000)
		d, err := p.Expose(data, session.RemoteRead)
		if err != nil {
			t.Fatal(err)
		}
		r := goRead(s, make([]byte, 200_000))
		pass(time.Second)
		e.Hold(twin.HoldReads)
		const before = 10
		for range before { // all of them arrive at once
			p.send(tData, 0, 'x')
		}
		p.send(tOfferRead, 0, u64(1, d.Addr, d.Key, d.Len)...)
		p.expect(tCredit)
		select {
		case x := <-r:
			t.Fatalf("Read, with a transfer under way: %+v", x)
		default:
		}
		e.Hold(0)
		if x := within(t, r); x.n != before+len(data) || x.err != nil {
			t.Errorf("Read: %+v", x)
		}
	})
}

// If a Read's transfer is complete in the same poll, the credit that the Read owes is sent by the Read,
// and not first by the idle poller.
func TestCreditDoesNotWaitForTheIdlePoller(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		cfg := byRead
		cfg.SendQueue = 40
		s, _, p := negotiatedOn(t, cfg, session.Config{KeepAlive: -1, ReceiveBudget: 1}, withMemory(func(m session.Memory) session.Memory {
			return atOnce{m}
		}))
		const before, direct = 10, 256 << 10 // half of the offer, so that no other message is due
		d, err := p.Expose(make([]byte, 2*direct), session.RemoteRead)
		if err != nil {
			t.Fatal(err)
		}
		for range before {
			p.send(tData, 0, 'x')
		}
		p.send(tOfferRead, 0, u64(1, d.Addr, d.Key, d.Len)...)
		p.send(tPong, 0) // so that the Read gets as far as the offer
		pass(2 * latency)
		if n, err := s.Read(make([]byte, before+direct)); n != before+direct || err != nil {
			t.Fatalf("Read: %d, %v", n, err)
		}
		began := time.Now()
		p.expect(tCredit)
		if took := time.Since(began); took > time.Millisecond {
			t.Errorf("it came %v after the Read", took)
		}
	})
}

// Credit that is due while there is no room is sent as soon as there is room.
func TestCreditWaitsForRoom(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		cfg := messages
		cfg.SendQueue = session.ControlReserve + 1
		s, _, p := negotiated(t, cfg, session.Config{KeepAlive: -1})
		p.Hold(twin.HoldMessages) // messages on their way to the peer stay in the session's queue
		for range cfg.SendQueue {
			p.send(tPing, 0) // the replies fill it
			pass(time.Millisecond)
		}
		const n = 12
		for range n {
			p.send(tData, 0, 1)
			pass(time.Millisecond)
		}
		readFull(t, s, n)
		pass(time.Second) // the session becomes idle
		p.Hold(0)
		for deadline := time.Now().Add(time.Second); time.Now().Before(deadline); {
			if m := p.recv(); m != nil && le.Uint32(m[4:]) >= n {
				return
			}
		}
		t.Error("the peer is not told of the buffers that are free again")
	})
}

// While nothing was released, no Credit is sent, however often the session polls.
func TestNoCreditIsSentForNothing(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		cfg := messages
		cfg.SendQueue = 40
		s, _, p := negotiated(t, cfg, session.Config{})
		for range cfg.Limits.Window - session.ControlReserve - 1 { // Negotiate used one
			p.send(tData, 0, 'x')
		}
		for range 20 {
			pass(time.Second)
			s.ReadUrgent(nil)
		}
		said := 0
		for m := p.recv(); m != nil; m = p.recv() {
			if m[0] == tCredit {
				said++
			}
		}
		if said > 1 {
			t.Errorf("it says so %d times", said)
		}
	})
}

// A peer that is nearly out of credit is granted even a little: without it, it could not even close.
func TestTheLastCreditIsSent(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		cfg := messages
		cfg.SendQueue = 40
		s, _, p := negotiated(t, cfg, session.Config{})
		for range cfg.Limits.Window - session.ControlReserve - 2 {
			p.send(tData, 0, 'x')
		}
		pass(time.Second)
		for m := p.recv(); m != nil; m = p.recv() {
		}
		readFull(t, s, 1)
		p.expect(tCredit)
	})
}

// A Write that waits for credit and looks repeatedly counts as one stall.
func TestStallsAreCountedOnce(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		s, _, p := negotiated(t, messages, session.Config{KeepAlive: -1, SendBudget: 1})
		p.send(tCredit, 0)
		pass(time.Second)
		goWrite(s, pattern(1<<20))
		for want := range uint64(3) {
			for range 5 { // it is woken, and looks again
				pass(time.Second)
				p.send(tUrgent, 0, 'u')
			}
			pass(time.Second)
			if got := s.Stats().Stalls; got != want+1 {
				t.Errorf("%d stalls, want %d", got, want+1)
			}
			for m := p.recv(); m != nil; m = p.recv() { // all that the Write could send
			}
			p.send(tCredit, 0)
		}
	})
}

// A Credit message costs no credit, so an end without credit can still grant some. A received Credit is
// not counted as a message to be dealt with either.
func TestCreditCostsNone(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		cfg := messages
		cfg.SendQueue = 60
		_, _, p := negotiated(t, cfg, session.Config{KeepAlive: -1})
		granted := cfg.Limits.Window - session.ControlReserve
		p.dropped = 0
		next := func(most int) (types []byte) {
			for range most {
				m := p.recv()
				if m == nil {
					break
				}
				p.dropped = 0 // so that no message grants credit
				types = append(types, m[0])
			}
			return types
		}
		for range 20 { // Credits alone cause no reply
			p.send(tCredit, 0)
			pass(time.Millisecond)
		}
		p.send(tUrgent, 0, 'u')
		pass(time.Second)
		if got := next(10); len(got) != 0 {
			t.Errorf("it answers by %d", got)
		}
		for range granted - 1 { // uses up the session's credits; Negotiate used one
			p.send(tPing, 0)
			pass(time.Millisecond)
			next(10)
		}
		for range 16 {
			p.send(tUrgent, 0, 'u')
			pass(time.Millisecond)
		}
		pass(time.Second)
		if got := next(10); len(got) == 0 || got[0] != tCredit {
			t.Errorf("without credit it sends %d", got)
		}
	})
}
