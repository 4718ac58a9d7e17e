package credit

import (
	"math/rand/v2"
	"testing"
)

func TestZeroValueHasNoLimit(t *testing.T) {
	var c Counts
	for range 3 * Max {
		c.Sent()
	}
	if left, err := c.Left(); left != Max || err != nil {
		t.Errorf("Left is %d, %v", left, err)
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
	if left, err := c.Left(); left != 0 || err != nil {
		t.Fatalf("after 16 messages %d credits are left (%v)", left, err)
	}
	if news, err := c.Received(5, false); !news || err != nil {
		t.Fatalf("credit for 5: %v, %v", news, err)
	}
	if left, err := c.Left(); left != 5 || err != nil {
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
	if _, err := c.Left(); err == nil {
		t.Error("the peer has dealt with two messages of one")
	}
	if _, err := c.Received(1, true); err == nil {
		t.Error("credit goes backwards")
	}
}

// Two ends that send as long as they have credit, in any order and with any delay, never
// exceed the other's buffers, nor the Reserved ones by Credit, and never stop for good.
func TestTwoEndsNeitherOverrunNorStop(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 1))
		buffers := 24 + r.IntN(40)
		var ends [2]*end
		for i := range ends {
			ends[i] = &end{t: t, seed: seed, buffers: buffers, unsent: 1000}
			ends[i].Open(buffers)
			ends[i].Limit(uint32(buffers - Reserved))
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

type message struct {
	credit uint32
	costs  bool
}

// end is one of two that send each other messages.
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
	left, err := e.Left()
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

// receives receives the next message of its peer, if there is one.
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

// dealsWith ends the use of a message, if there is one.
func (e *end) dealsWith() bool {
	if e.pending == 0 {
		return false
	}
	e.pending--
	e.DealtWith()
	return true
}
