package credit

import (
	"math/rand/v2"
	"sync/atomic"
	"testing"
)

func TestZeroValueHasNoLimit(t *testing.T) {
	var c Counts
	for range 3 * Max {
		c.Sent()
	}
	if left, err := c.Available(); left != Max || err != nil {
		t.Errorf("Available is %d, %v", left, err)
	}
	if news, err := c.Received(77, true); news || err != nil {
		t.Errorf("Received is %v, %v", news, err)
	}
	c.DealtWith()
	if c.Due() || c.Advertise() != 0 {
		t.Error("there is a credit to report")
	}
}

func TestCreditsRunOutAndReturn(t *testing.T) {
	var c Counts
	c.Open(24)
	c.Limit(16)
	for range 16 {
		c.Sent()
	}
	if left, err := c.Available(); left != 0 || err != nil {
		t.Fatalf("after 16 messages %d credits are left (%v)", left, err)
	}
	if news, err := c.Received(5, false); !news || err != nil {
		t.Fatalf("credit for 5: %v, %v", news, err)
	}
	if left, err := c.Available(); left != 5 || err != nil {
		t.Fatalf("%d credits are left (%v)", left, err)
	}
}

func TestCreditForWhatWasNotSentIsAnError(t *testing.T) {
	var c Counts
	c.Open(24)
	c.Limit(16)
	c.Sent()
	if _, err := c.Received(2, true); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Available(); err == nil {
		t.Error("the peer has dealt with two messages of one")
	}
	if _, err := c.Received(1, true); err == nil {
		t.Error("credit goes backwards")
	}
}

// Two ends that send whenever they have credit, in any order and with any delay, never exceed the peer's
// receive buffers, nor with Credits the Reserved ones, and never stop for good.
func TestTwoEndsNeitherOverrunNorStop(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 1))
		buffers := 24 + r.IntN(40)
		start := []uint32{0, 1<<31 - 500, 1<<32 - 500}[seed%3] // messages sent before, so that the counts wrap
		var ends [2]*end
		for i := range ends {
			ends[i] = &end{t: t, seed: seed, buffers: buffers, unsent: 1000}
			ends[i].Open(buffers)
			ends[i].Limit(uint32(buffers - Reserved))
			ends[i].startAt(start)
		}
		for idle := 0; (ends[0].unsent > 0 || ends[1].unsent > 0) && idle < 10000; idle++ {
			i := r.IntN(2)
			e, peer := ends[i], ends[1-i]
			if [](func() bool){e.sends, func() bool { return e.receives(peer) }, e.dealsWith}[r.IntN(3)]() {
				idle = 0
			}
			if e.Due() {
				e.send(false)
			}
		}
		if ends[0].unsent > 0 || ends[1].unsent > 0 {
			t.Fatalf("seed %d: they stopped with %d and %d left", seed, ends[0].unsent, ends[1].unsent)
		}
	}
}

// startAt makes all counts begin at n.
func (c *Counts) startAt(n uint32) {
	c.sent, c.marked = n, n
	for _, count := range []*atomic.Uint32{&c.peerFreed, &c.received, &c.freed, &c.advertised} {
		count.Store(n)
	}
}

// A Credit message is due when half of what data may use has not been reported, or when the peer may
// have few credits left. The counts may wrap.
func TestCreditIsDue(t *testing.T) {
	for _, start := range []uint32{0, 1<<31 - 2, 1<<32 - 2, 1<<32 - 13} {
		for _, tt := range []struct{ received, dealtWith int }{{4, 4}, {12, 1}} {
			var c Counts
			c.Open(24)
			c.startAt(start)
			for i := range tt.received {
				c.Received(start, true)
				if c.Due() {
					t.Errorf("from %d: due after %d messages, none dealt with", start, i)
				}
			}
			for i := range tt.dealtWith {
				if c.Due() {
					t.Errorf("from %d: due with %d of %d dealt with", start, i, tt.received)
				}
				c.DealtWith()
			}
			if !c.Due() {
				t.Errorf("from %d: not due with %d of %d dealt with", start, tt.dealtWith, tt.received)
			}
			if c.Advertise(); c.Due() {
				t.Errorf("from %d: due again", start)
			}
		}
	}
}

// A marked message is in flight until the peer has dealt with it, even if the counts wrap.
func TestAMarkedMessageIsUnderWayUntilItIsDealtWith(t *testing.T) {
	for _, start := range []uint32{0, 1<<31 - 2, 1<<32 - 2} {
		var c Counts
		c.Open(24)
		c.Limit(16)
		c.startAt(start)
		if c.MarkedUnderWay() {
			t.Errorf("from %d: a message that was not sent is under way", start)
		}
		for range 3 {
			c.Sent()
		}
		c.Mark()
		c.Sent()
		for dealt := range uint32(5) {
			c.Received(start+dealt, false)
			if got := c.MarkedUnderWay(); got != (dealt < 3) {
				t.Errorf("from %d, %d dealt with: under way is %v", start, dealt, got)
			}
		}
	}
	var none Counts
	none.Sent()
	none.Mark()
	if none.MarkedUnderWay() {
		t.Error("without credits a message is known to be under way")
	}
}

type message struct {
	credit uint32
	costs  bool
}

// end is one of two ends that send each other messages.
type end struct {
	Counts
	t       *testing.T
	seed    uint64
	buffers int
	wire    []message // to the other end
	pending int       // received, not dealt with
	unsent  int
}

func (e *end) send(costs bool) {
	if costs {
		e.Sent()
	}
	e.wire = append(e.wire, message{e.Advertise(), costs})
	plain := 0
	for _, m := range e.wire {
		if !m.costs {
			plain++
		}
	}
	if len(e.wire) > e.buffers || plain > Reserved {
		e.t.Fatalf("seed %d: %d messages are under way, %d of them Credit", e.seed, len(e.wire), plain)
	}
}

// sends sends a message if there is credit for it, and reports whether it did.
func (e *end) sends() bool {
	left, err := e.Available()
	if err != nil {
		e.t.Fatal(err)
	}
	if left <= Control || e.unsent == 0 {
		return false
	}
	e.send(true)
	e.unsent--
	return true
}

// receives takes the next message of its peer, if there is one, and reports whether it did.
func (e *end) receives(peer *end) bool {
	if len(peer.wire) == 0 {
		return false
	}
	m := peer.wire[0]
	peer.wire = peer.wire[1:]
	if _, err := e.Received(m.credit, m.costs); err != nil {
		e.t.Fatal(err)
	}
	if m.costs {
		e.pending++
	}
	return true
}

// dealsWith deals with a received message, if there is one, and reports whether it did.
func (e *end) dealsWith() bool {
	if e.pending == 0 {
		return false
	}
	e.pending--
	e.DealtWith()
	return true
}
