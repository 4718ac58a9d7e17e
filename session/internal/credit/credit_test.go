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
		type message struct {
			credit uint32
			costs  bool
		}
		type end struct {
			Counts
			wire    []message // to the other end
			pending int       // received, not dealt with
			sent    int
		}
		var ends [2]end
		for i := range ends {
			ends[i].Open(buffers)
			ends[i].Limit(uint32(buffers - Reserved))
			ends[i].sent = 1000
		}
		send := func(e *end, costs bool) {
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
			if len(e.wire) > buffers || plain > Reserved {
				t.Fatalf("seed %d: %d messages are under way, %d of them Credit", seed, len(e.wire), plain)
			}
		}
		idle := 0
		for (ends[0].sent > 0 || ends[1].sent > 0) && idle < 10000 {
			i := r.IntN(2)
			e, peer := &ends[i], &ends[1-i]
			idle++
			switch r.IntN(3) {
			case 0:
				left, err := e.Left()
				if err != nil {
					t.Fatal(err)
				}
				if left > Control && e.sent > 0 {
					send(e, true)
					e.sent--
					idle = 0
				}
			case 1:
				if len(peer.wire) > 0 {
					m := peer.wire[0]
					peer.wire = peer.wire[1:]
					if _, err := e.Received(m.credit, m.costs); err != nil {
						t.Fatal(err)
					}
					if m.costs {
						e.pending++
					}
					idle = 0
				}
			case 2:
				if e.pending > 0 {
					e.pending--
					e.DealtWith()
					idle = 0
				}
			}
			if e.Due() {
				send(e, false)
			}
		}
		if ends[0].sent > 0 || ends[1].sent > 0 {
			t.Fatalf("seed %d: they stopped with %d and %d left", seed, ends[0].sent, ends[1].sent)
		}
	}
}
