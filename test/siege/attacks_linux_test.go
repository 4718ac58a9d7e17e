package siege

import (
	"fmt"
	"testing"
	"time"

	"github.com/sanconn/san/internal/testenv"
)

// asTCP is how much processor time one unit of an attacker's may cost the victim, if the victim has some
// work to do for it. Over TCP, too, receiving a small packet costs the receiver several times what
// sending it costs the sender.
const asTCP = 3

// A peer that was written from docs/PROTOCOL.md only is served.
func TestPeerFromTheDocument(t *testing.T) {
	r := lay(t, spec{})
	r.attack("peer", struct{}{})
	r.siege(bounds{})
}

// Names of the victim's port that another user takes keep nobody from finding the victim.
func TestNamesOfAnotherUser(t *testing.T) {
	r := lay(t, spec{})
	for range 3 {
		r.attack("squat", 3000)
	}
	if provider := r.newcomer(); provider != "shm" {
		t.Errorf("a newcomer is on %s", provider)
	}
	if met := r.siege(bounds{}); met.Dials["shm"] == 0 || met.Dials["tcp"] != 0 {
		t.Errorf("dials: %v", met.Dials)
	}
}

// Whatever a peer passes as its doorbell, ringing it blocks no thread.
func TestDoorbellsThatBlock(t *testing.T) {
	r := lay(t, spec{})
	r.attack("bells", struct{}{})
	r.siege(bounds{connections: 8, descriptors: 8 * 5, space: 8 << 27, cpu: asTCP})
}

// Small messages that nobody reads cost a bounded part of the memory for rings.
func TestUnreadMessages(t *testing.T) {
	const conns, ring, budget = 64, 4 << 20, 256 << 20 // the answers, which are unread as well, are charged to the budget
	r := lay(t, spec{})
	r.attack("unread", conns)
	r.settle()
	r.siege(bounds{connections: conns, descriptors: conns, memory: conns * ring / 2, shared: conns*ring + budget, space: 8 << 30, cpu: asTCP})
}

// What the victim sends to a user who does not read takes at most half of the memory for rings.
func TestUnreadRings(t *testing.T) {
	const conns, start, half = 128, 64 << 10, 256 << 20
	r := lay(t, spec{})
	r.attack("greedy", conns)
	r.siege(bounds{connections: conns, descriptors: conns, memory: conns << 17, shared: conns*start + half, space: 8 << 30})
}

// When a link has ended, none of the memory that the victim has written for it is left, although its
// peer keeps the descriptors. If the victim has closed connections that the peer has not read, their
// memory is charged to the budget until the peer's process has ended: so the next attacker gets as much.
func TestMemoryThatIsKept(t *testing.T) {
	const links, conns, start, half = 2, 40, 64 << 10, 256 << 20
	r := lay(t, spec{})
	keep := func(links int) (end func()) {
		a := r.attack("keep", [2]int{links, conns})
		testenv.Eventually(t, patience, func() error {
			var k kept
			a.tell("kept")
			if a.hear("kept", &k); k.Ended > 0 || k.Unread < half/8 {
				return fmt.Errorf("%d bytes are left of links that have ended, and %d are unread", k.Ended, k.Unread)
			}
			return nil
		})
		return a.kill
	}
	end := keep(links)
	r.siege(bounds{connections: conns, descriptors: conns, memory: conns << 17, shared: conns*start + half, space: 8 << 30})
	end()
	testenv.Eventually(t, patience, func() error {
		if now := usageOf(t, r.victim.pid()); now.shared-r.before.shared > slack.shared {
			return fmt.Errorf("behind the attacker's end the victim has %v", now)
		}
		return nil
	})
	keep(0)
}

// A deadline ends an operation whatever the peer does.
func TestDeadlines(t *testing.T) {
	const conns = 32
	r := lay(t, spec{})
	r.attack("wait", conns)
	r.siege(bounds{connections: conns, descriptors: conns + 4, memory: 4 * conns << 20, shared: 8 * conns << 20, space: 8 << 30, cpu: asTCP})
	const times = 5
	var v victimReport
	testenv.Eventually(t, patience, func() error {
		if v = r.report(); v.Longest > patience/2 {
			t.Fatalf("an operation takes %v", v.Longest)
		}
		if v.Waiting < conns || v.Ended < times {
			return fmt.Errorf("%d connections wait, and deadlines have ended %d Reads or Writes of one", v.Waiting, v.Ended)
		}
		return nil
	})
	if v.Late > v.Overslept+500*time.Millisecond { // the median of many, because a busy machine stops some
		t.Errorf("operations end %v after their deadlines, where sleeps take %v too long", v.Late, v.Overslept)
	}
}

// False news cost the victim a multiple of what they cost the attacker: the attacker makes two stores,
// and the victim's look at what there is takes ten times as long. On a busy machine up to 24 times have
// been measured.
func TestKicks(t *testing.T) {
	const conns = 512
	r := lay(t, spec{})
	r.attack("kick", conns)
	r.siege(bounds{connections: conns, descriptors: conns + 4, memory: 64 << 20, space: 16 << 30, cpu: 24})
}

// On shared memory nobody gets memory to write to, or learns an address of it.
func TestInboxesOnARing(t *testing.T) {
	const conns = 64
	r := lay(t, spec{})
	a := r.attack("inbox", conns)
	told := 0
	if a.hear("told", &told); told != 0 {
		t.Errorf("%d of %d connections were granted memory", told, conns)
	}
	r.siege(bounds{connections: conns, descriptors: conns + 8, memory: 8 << 20, space: 8 << 30})
}
