package shm

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/session"
)

// A slot has one connection at a time, whatever the dialing end requests.
func TestSlotInUseIsNotConnectedAgain(t *testing.T) {
	leaks(t)
	l := listen(t, Config{})
	s := dialRaw(t, l)
	s.handshake()
	b := s.connect(l, 3)
	p := newPeer(b)
	s.send(connectTo(3))
	if !p.in.sleep() {
		t.Error("the link lives")
	}
	if err := b.Err(); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the connection: %v", err)
	}
	end(b)
	s.awaitHangUp()
	servesOthers(t, l)
}

// A peer requests one more connection, and ends before it takes the answer. That is no breach of the
// protocol: its other connections end normally.
func TestPeerThatEndsWhileItConnects(t *testing.T) {
	leaks(t)
	l := listen(t, Config{})
	for range 20 {
		s := dialRaw(t, l)
		s.handshake()
		b := s.connect(l, 3)
		p := newPeer(b)
		for slot := range uint32(3) {
			s.send(connectTo(slot))
		}
		s.conn.Close()
		if !p.in.sleep() {
			t.Error("the link lives")
		}
		if err := b.Err(); !errors.Is(err, io.EOF) {
			t.Errorf("the connection: %v", err)
		}
		end(b)
	}
}

// While a dialing process is stopped, more answers are due than its socket's queue can hold. It keeps
// its connections, and gets the answers when it goes on.
func TestAnswersWaitForAStoppedPeer(t *testing.T) {
	leaks(t)
	limits := startLimits
	limits.connections = 2 // one user gets one of them
	withLimits(t, limits)
	l := listen(t, Config{})
	s := dialRaw(t, l)
	s.handshake()
	b := s.connect(l, 0)
	defer end(b)
	s.conn.SetWriteDeadline(time.Now().Add(3 * handshakeTimeout / 2))
	asked := 0
	for err := error(nil); ; asked++ {
		if _, err = s.conn.Write(connectTo(1)); err != nil {
			if !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Fatalf("after %d questions: %v", asked, err)
			}
			break
		}
	}
	if err := b.Err(); err != nil {
		t.Errorf("the connection of a peer that is stopped: %v", err)
	}
	for n := range asked {
		var m message
		if _, err := receive(s.conn, &m); err != nil || m.kind != msgRefuse || m.number != 1 || m.code != codeResources {
			t.Fatalf("answer %d of %d: %+v, %v", n, asked, m, err)
		}
	}
	s.conn.Close()
}

func TestConnectionsShareOneLink(t *testing.T) {
	leaks(t)
	l := listen(t, Config{})
	var ends []session.Endpoint
	for range 40 { // more than the first segment holds
		a, b := meet(t, l)
		ends = append(ends, a, b)
	}
	links := map[*link]bool{}
	for _, ep := range ends {
		links[ep.(*endpoint).link] = true
	}
	if len(links) != 2 { // both ends of the link
		t.Errorf("%d links", len(links))
	}
	slots := map[int]bool{}
	for round := range 3 {
		for i, ep := range ends {
			if i%2 == 0 {
				slots[ep.(*endpoint).slot.number] = true
			}
			end(ep)
		}
		ends = nil
		for range 40 {
			a, b := meet(t, l)
			p, q := newPeer(a), newPeer(b)
			if p.Err() != nil || q.Err() != nil || p.Poll(new(session.Event)) || q.Poll(new(session.Event)) {
				t.Fatalf("round %d: a slot is not fresh", round)
			}
			ends = append(ends, a, b)
		}
	}
	if len(slots) > 48+16 {
		t.Errorf("%d slots for 40 connections", len(slots))
	}
	for _, ep := range ends {
		end(ep)
	}
}

// withFiles starts a child with RLIMIT_NOFILE set to files.
func withFiles(files int) func(*exec.Cmd) {
	return func(c *exec.Cmd) {
		c.Path, c.Args = "/bin/sh", []string{"sh", "-c", fmt.Sprintf("ulimit -n %d && exec %s", files, c.Path)}
	}
}

// A process accepts from one user no more connections than half of its RLIMIT_NOFILE, although a
// connection takes fewer descriptors.
func TestConnectionsAreBoundedByTheProcessesLimit(t *testing.T) {
	leaks(t)
	const files = 64
	c := spawn(t, "hold", withFiles(files))
	conns := []session.Endpoint{dialChild(t, c, Config{})}
	var err error
	for err == nil && len(conns) <= files {
		var ep session.Endpoint
		if ep, err = dial(c.at, Config{}); err == nil {
			conns = append(conns, ep)
		}
	}
	wantReason(t, err, session.ReasonResources)
	if len(conns) != files/2 {
		t.Errorf("%d connections with %d descriptors, want %d", len(conns), files, files/2)
	}
	for _, ep := range conns {
		end(ep)
	}
}

func TestManyConnectionsTakeFewDescriptors(t *testing.T) {
	const many, few = 2000, 64
	leaks(t)
	c := spawn(t, "hold", withFiles(2*many)) // a process that may accept many
	first := dialChild(t, c, Config{})
	before := count(t)
	peers := []*peer{first}
	for len(peers) < many {
		ep, err := dial(c.at, Config{})
		if err != nil {
			t.Fatalf("connection %d: %v", len(peers), err)
		}
		peers = append(peers, newPeer(ep))
	}
	defer func() {
		for _, p := range peers {
			end(p)
		}
	}()
	after := count(t)
	if n := after.fds - before.fds; n > 16 {
		t.Errorf("%d connections take %d descriptors", many, n)
	}
	if n := after.goroutines - before.goroutines; n > 16 {
		t.Errorf("%d connections take %d goroutines", many, n)
	}
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", c.cmd.Process.Pid))
	if err != nil || len(fds) > few {
		t.Errorf("%d connections take %d descriptors at the accepting end, %v", many, len(fds), err)
	}
	var ev session.Event
	for _, i := range []int{0, 1, 17, 999, many - 1} {
		if p := peers[i]; !p.send([]byte("hello")) || !p.poll(&ev) || string(ev.Msg) != "hello" {
			t.Errorf("connection %d: no echo: %v", i, p.Err())
		} else {
			p.Drop()
		}
	}
}

// A link fails, at either end, while both processes live: what has come is read, even if it is read only
// after the end that wrote it has retired.
func TestReadBehindALinkThatFails(t *testing.T) {
	leaks(t)
	for _, writerFails := range []bool{true, false} {
		for n := range 4 {
			alone, before := n%2 == 0, n/2 == 0 // before: the writer has retired before the Read
			l := listen(t, Config{})
			x, y := meet(t, l)
			a, b := newPeer(x), newPeer(y)
			reader, writer := x.(*endpoint).link, y.(*endpoint).link
			if !alone { // another connection keeps the link
				c, d := meet(t, l)
				defer end(c)
				defer end(d)
			}
			msg := make([]byte, unreadSize)
			pattern(msg, 1)
			b.send(msg)
			var ev session.Event
			if !a.poll(&ev) {
				t.Fatal(a.Err())
			}
			fails, other := writer, reader
			if !writerFails {
				fails, other = reader, writer
			}
			if before {
				end(b)
			}
			fails.die(errMessage)
			testenv.Eventually(t, patience, func() error {
				if !other.over() {
					return errors.New("the other end does not know")
				}
				return nil
			})
			if !before {
				end(b)
			}
			for range cacheTicks + 1 {
				writer.sweep()
			}
			writer.mu.Lock()
			torn := writer.torn
			writer.mu.Unlock()
			if torn || !bytes.Equal(ev.Msg, msg) {
				t.Errorf("the writer's link fails: %v, behind its end: %v, alone: %v: it is given back: %v; %x… is read", writerFails, before, alone, torn, ev.Msg[:8])
			}
			end(a)
		}
	}
}

// A link that has failed in this process ends once its peer has read what it was sent.
func TestLinkThatFailsEndsOnceRead(t *testing.T) {
	leaks(t)
	for _, dialed := range []bool{true, false} {
		l := listen(t, Config{})
		x, y := meet(t, l)
		if dialed {
			x, y = y, x
		}
		a, b := newPeer(x), newPeer(y)
		writer := y.(*endpoint).link
		msg := make([]byte, unreadSize)
		pattern(msg, 1)
		b.send(msg)
		var ev session.Event
		if !a.poll(&ev) {
			t.Fatal(a.Err())
		}
		writer.die(errMessage)
		end(b)
		end(a)
		testenv.Eventually(t, patience, func() error {
			writer.mu.Lock()
			defer writer.mu.Unlock()
			if !writer.torn {
				return errors.New("the link is still there")
			}
			return nil
		})
	}
}

// What a peer has sent before it closed is read, even if the link has failed in this process.
func TestReadWhatAPeerThatClosedHasSent(t *testing.T) {
	leaks(t)
	l := listen(t, Config{})
	x, y := meet(t, l)
	a, b := newPeer(x), newPeer(y)
	msg := make([]byte, 1000)
	pattern(msg, 1)
	b.send(msg)
	b.Close()
	x.(*endpoint).link.die(errMessage)
	var ev session.Event
	if !a.poll(&ev) || !bytes.Equal(ev.Msg, msg) {
		t.Errorf("%x, %v", ev.Msg, a.Err())
	}
	end(b)
	end(a)
}
