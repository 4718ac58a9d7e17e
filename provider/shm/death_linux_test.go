package shm

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/provider/shm/internal/ring"
	"github.com/sanconn/san/session"
)

func TestForkedChildDoesNotHideThePeersEnd(t *testing.T) {
	leaks(t)
	c := spawn(t, "fork", nil)
	p := dialChild(t, c, Config{})
	var pid int
	fmt.Sscan(c.line(t, "forked"), &pid)
	defer syscall.Kill(pid, syscall.SIGKILL)
	var ev session.Event
	if !p.send([]byte("hello")) || !p.poll(&ev) {
		t.Fatalf("no echo: %v", p.Err())
	}
	p.Drop()
	c.cmd.Process.Kill()
	start := time.Now()
	if p.poll(&ev) {
		t.Fatalf("an event from a dead peer: %+v", ev)
	}
	if !errors.Is(p.Err(), io.EOF) {
		t.Errorf("the peer's end shows as %v", p.Err())
	}
	if d := time.Since(start); d > patience/2 {
		t.Errorf("noticed after %v", d)
	}
	if err := syscall.Kill(pid, 0); err != nil {
		t.Fatalf("the forked child did not outlive its parent, so this shows nothing: %v", err)
	}
}

func TestPeerThatBecomesAnotherProgramIsGone(t *testing.T) {
	leaks(t)
	c := spawn(t, "exec", nil)
	p := dialChild(t, c, Config{})
	var ev session.Event
	if !p.send([]byte("hello")) || !p.poll(&ev) || string(ev.Msg) != "hello" {
		t.Fatalf("no echo: %v", p.Err())
	}
	p.Drop()
	if p.poll(&ev) || !errors.Is(p.Err(), io.EOF) {
		t.Errorf("the peer's end shows as %v", p.Err())
	}
}

// A process can no longer receive on a link, for example because of its own seccomp filter: neither end
// of a connection may find that the other's stream has ended in order.
func TestLinkThatCannotReceiveResets(t *testing.T) {
	leaks(t)
	l := listen(t, Config{})
	a, b := meet(t, l)
	defer end(a)
	defer end(b)
	a.(*endpoint).link.control.SetReadDeadline(longAgo)
	for _, ep := range []session.Endpoint{a, b} {
		var ev session.Event
		if p := newPeer(ep); p.poll(&ev) || !errors.Is(p.Err(), syscall.ECONNRESET) {
			t.Errorf("an end of the connection shows %v", p.Err())
		}
	}
}

func TestKillInTheMiddleLosesNothingThatWasCommitted(t *testing.T) {
	rounds := 20
	if testing.Short() {
		rounds = 3
	}
	for i := range rounds {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			leaks(t)
			c := spawn(t, "flood", nil)
			p := dialChild(t, c, Config{})
			sender := make(chan struct{})
			go func() {
				defer close(sender)
				b := make([]byte, 3000)
				for p.send(b) {
				}
			}()
			r := rand.New(rand.NewSource(4))
			want := make([]byte, ring.MaxMessage)
			kill := rand.Intn(2000)
			var ev session.Event
			seen := 0
			for ; p.poll(&ev); seen++ {
				if seen == kill {
					c.cmd.Process.Kill()
				}
				n := 8 + r.Intn(1<<r.Intn(17))
				n = min(n, ring.MaxMessage)
				pattern(want[:n], uint64(seen))
				if !bytes.Equal(ev.Msg, want[:n]) {
					t.Fatalf("message %d is cut or wrong: %d bytes of %d", seen, len(ev.Msg), n)
				}
				p.Drop()
			}
			<-sender
			if err := p.Err(); !errors.Is(err, io.EOF) && !errors.Is(err, errPeerUnread) { // by what the peer had read
				t.Errorf("the peer's end shows as %v", err)
			}
			if s := p.Endpoint.(*endpoint).slot; s.peers.control.out.Backlog(&s.own.control.in) != 0 {
				t.Error("not all was read")
			}
		})
	}
}
