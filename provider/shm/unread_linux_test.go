package shm

import (
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/session"
)

const stepsVariable = "SAN_SHM_TEST_STEPS"

func init() {
	// Handles messages as its input tells, by one letter each: d(rop), k(eep), r(elease).
	roles["step"] = func() error {
		return serveRole(func(p *peer) {
			var ev session.Event
			for _, step := range os.Getenv(stepsVariable) {
				switch {
				case step == 'r':
					p.Release()
				case !p.poll(&ev):
					fmt.Println("error", p.Err())
				case step == 'k':
					p.Keep()
				default:
					p.Drop()
				}
			}
			fmt.Println("done")
			untilStdinEnds()
		})
	}
	// Keeps a message of its connection, which it ends, and hangs up.
	roles["hang up"] = func() error {
		return serveRole(func(p *peer) {
			if !p.poll(new(session.Event)) {
				fmt.Println("error", p.Err())
				return
			}
			p.Keep()
			p.Close()
			hangUp(p.Endpoint.(*endpoint).link.control.UnixConn)
			fmt.Println("done")
			untilStdinEnds()
		})
	}
}

// If a process dies with data unread in the ring, its peer finds a reset, as with TCP. Control messages
// do not count as data, and it does not matter how far the published head lags.
func TestProcessThatDiesBeforeItHasReadAll(t *testing.T) {
	leaks(t)
	for _, tc := range []struct {
		name  string
		sent  string // D(ata), C(ontrol)
		steps string // of the process that dies
		want  error
	}{
		{"nothing", "", "", io.EOF},
		{"data that was dropped", "D", "d", io.EOF},
		{"data that was not seen", "D", "", syscall.ECONNRESET},
		{"data that was kept", "D", "k", syscall.ECONNRESET},
		{"data that was kept and released", "D", "kr", io.EOF},
		{"data of which some was not seen", "DD", "d", syscall.ECONNRESET},
		{"data of which some was kept", "DDD", "kkr", syscall.ECONNRESET},
		{"control that was not seen", "C", "", io.EOF},
		{"control behind data", "DC", "d", io.EOF},
		{"control behind data that was kept", "DC", "kd", syscall.ECONNRESET},
		{"control behind data that was released", "DCC", "kdr", io.EOF},
		{"data behind control", "CD", "d", syscall.ECONNRESET},
		{"data behind control, dropped", "CDC", "dd", io.EOF},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := spawn(t, "step", nil, stepsVariable+"="+tc.steps)
			p := dialChild(t, c, Config{})
			for _, kind := range tc.sent {
				sent := kind == 'C' && p.control(8) || kind != 'C' && p.send(make([]byte, 8))
				if !sent {
					t.Fatal(p.Err())
				}
			}
			c.line(t, "done")
			c.kill()
			if p.poll(new(session.Event)) {
				t.Error("an event of a peer that sent nothing")
			}
			if !errors.Is(p.Err(), tc.want) {
				t.Errorf("the peer's end shows as %v, not as %v", p.Err(), tc.want)
			}
		})
	}
}

// What a peer has still to read stays while a link ends that nobody here uses any more.
func TestUnreadStaysWhileAnUnusedLinkEnds(t *testing.T) {
	leaks(t)
	l := listen(t, Config{})
	x, y := meet(t, l)
	a, b := newPeer(x), newPeer(y)
	defer end(a)
	k := y.(*endpoint).link
	ending := make(chan struct{})
	k.mu.Lock()
	dismantle := k.lifetime.dismantle
	k.lifetime.dismantle = func() { <-ending; dismantle() }
	k.mu.Unlock()
	defer close(ending)
	defer withoutReclaimer(k)() // this test takes the reclaimer's place
	const n = 20
	msg := make([]byte, 4096)
	for i := range n {
		pattern(msg, uint64(i))
		if !b.send(msg) {
			t.Fatal(b.Err())
		}
	}
	end(b)
	l.Close()
	if !k.over() {
		t.Error("the link goes on")
	}
	for range cacheTicks {
		k.sweep()
	}
	readPatterns(t, a, len(msg), n)
}

// What a peer has still to read also stays after an unused link has ended.
func TestUnreadStaysWhenAnUnusedLinkHasEnded(t *testing.T) {
	leaks(t)
	l := listen(t, Config{})
	x, y := meet(t, l)
	a, b := newPeer(x), newPeer(y)
	defer end(a)
	k := y.(*endpoint).link
	ended := make(chan struct{})
	k.mu.Lock()
	dismantle := k.lifetime.dismantle
	k.lifetime.dismantle = func() { dismantle(); close(ended) }
	k.mu.Unlock()
	const n = 20
	msg := make([]byte, 4096)
	for i := range n {
		pattern(msg, uint64(i))
		if !b.send(msg) {
			t.Fatal(b.Err())
		}
	}
	end(b)
	l.Close()
	select {
	case <-ended:
	case <-time.After(patience):
		t.Fatal("the link goes on")
	}
	readPatterns(t, a, len(msg), n)
}

// What a peer that has hung up may still read stays until its process ends, and no longer.
func TestUnreadStaysUntilTheProcessEnds(t *testing.T) {
	leaks(t)
	c := spawn(t, "hang up", nil)
	p := dialChild(t, c, Config{})
	k := p.Endpoint.(*endpoint).link
	if k.peer.pidfd == nil {
		testenv.MissingKernel(t, "pidfd")
	}
	if !p.send(make([]byte, 8)) {
		t.Fatal(p.Err())
	}
	c.line(t, "done")
	testenv.Eventually(t, patience, func() error {
		if !k.over() {
			return errors.New("the link goes on")
		}
		return nil
	})
	end(p)
	k.mu.Lock()
	torn := k.torn
	k.mu.Unlock()
	if torn {
		t.Error("the link is given up while the peer lives")
	}
	c.kill()
	awaitNoLinks(t)
}
