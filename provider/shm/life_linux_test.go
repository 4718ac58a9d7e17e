package shm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/provider/shm/internal/ring"
	"github.com/sanconn/san/session"
)

func asUser(id uint32) func(*exec.Cmd) {
	return func(c *exec.Cmd) {
		c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: id, Gid: id}}
	}
}

// inNamespaces starts a child in namespaces of its own, where it is root; here it is user.
func inNamespaces(flags uintptr, user int) func(*exec.Cmd) {
	return func(c *exec.Cmd) {
		c.SysProcAttr = &syscall.SysProcAttr{
			Cloneflags:  flags,
			UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: user, Size: 1}},
			GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: user, Size: 1}},
			Credential:  &syscall.Credential{NoSetGroups: true},
		}
	}
}

// runnable copies the test binary to where every user may run it.
func runnable(t *testing.T) func(*exec.Cmd) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "san-shm")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	b, err := os.ReadFile(self)
	if err != nil {
		t.Fatal(err)
	}
	os.Chmod(dir, 0o755)
	if err := os.WriteFile(dir+"/test", b, 0o755); err != nil {
		t.Fatal(err)
	}
	return func(c *exec.Cmd) { c.Path, c.Args[0], c.Dir = dir+"/test", dir+"/test", "/" }
}

// Who may reach whom.
func TestPeersOfOtherUsersAndNamespaces(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("needs root, to be other users")
	}
	place := runnable(t)
	const someone = 1234
	for _, tc := range []struct {
		name     string
		dialer   func(*exec.Cmd) // nil: as this process
		wantDial string          // what the dialing child says
	}{
		{"same user", nil, "dialed"},
		{"another user", asUser(someone), "dialed"},
		{"user namespace of ours", inNamespaces(syscall.CLONE_NEWUSER, 0), "dialed"},
		{"user namespace of another", inNamespaces(syscall.CLONE_NEWUSER, someone), "unavailable owner mismatch"},
		{"invisible process", inNamespaces(syscall.CLONE_NEWUSER|syscall.CLONE_NEWPID, 0), "dialed"},
	} {
		t.Run(tc.name+" dials", func(t *testing.T) {
			leaks(t)
			tcp, l := listen(t, "127.0.0.1:0", Config{})
			c := spawn(t, "dial", func(c *exec.Cmd) {
				place(c)
				if tc.dialer != nil {
					tc.dialer(c)
				}
			}, "ADDRESS="+tcp.Addr().String())
			if tc.wantDial != "dialed" {
				if got := "unavailable " + c.line(t, "unavailable"); got != tc.wantDial {
					t.Errorf("the child says %q, not %q", got, tc.wantDial)
				}
				return
			}
			ep, _, _, err := l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			p := newPeer(ep)
			defer end(p)
			done := make(chan struct{})
			go func() { defer close(done); echo(p) }()
			c.line(t, "dialed")
			c.line(t, "echoed")
			c.kill()
			select {
			case <-done:
			case <-time.After(patience):
				t.Fatal("the child's end was not noticed")
			}
			if err := p.Err(); !errors.Is(err, io.EOF) {
				t.Errorf("the child's end shows as %v", err)
			}
		})
	}
	nobody := session.ReasonNone // one user, where all are known
	if !knowsAllUsers() {
		nobody = session.ReasonOwner
	}
	for _, tc := range []struct {
		name     string
		listener func(*exec.Cmd)
		reason   session.Reason
	}{
		{"same user", nil, session.ReasonNone},
		{"another user", asUser(someone), session.ReasonNone},
		{"user namespace", inNamespaces(syscall.CLONE_NEWUSER, someone), session.ReasonNone},
		{"invisible to the other", inNamespaces(syscall.CLONE_NEWUSER|syscall.CLONE_NEWPID, someone), session.ReasonNone},
		{"nobody", asUser(overflowUID), nobody},
	} {
		t.Run(tc.name+" listens", func(t *testing.T) {
			leaks(t)
			c := spawn(t, "echo", func(c *exec.Cmd) {
				place(c)
				if tc.listener != nil {
					tc.listener(c)
				}
			})
			addr, err := net.ResolveTCPAddr("tcp", c.line(t, "listening"))
			if err != nil {
				t.Fatal(err)
			}
			ep, err := dial(addr, Config{})
			if tc.reason != session.ReasonNone {
				var u *session.Unavailable
				if !errors.As(err, &u) || u.Reason != tc.reason {
					t.Errorf("got %v, want %v", err, tc.reason)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			p := newPeer(ep)
			defer end(p)
			var ev session.Event
			if !p.send([]byte("hello")) || !p.poll(&ev) || string(ev.Msg) != "hello" {
				t.Fatalf("no echo: %v", p.Err())
			}
			p.Drop()
		})
	}
	t.Run("a squatter is not trusted", func(t *testing.T) {
		leaks(t)
		tcp, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer tcp.Close()
		c := spawn(t, "squat", func(c *exec.Cmd) { place(c); asUser(someone)(c) }, "NAME="+rendezvousOf(t, tcp).Name)
		c.line(t, "squatting")
		_, err = dial(tcp.Addr(), Config{})
		var u *session.Unavailable
		if !errors.As(err, &u) || u.Reason != session.ReasonOwner {
			t.Errorf("got %v", err)
		}
	})
}

func init() {
	roles["squat"] = func() error {
		u, err := net.ListenUnix("unixpacket", &net.UnixAddr{Net: "unixpacket", Name: os.Getenv("NAME")})
		if err != nil {
			return err
		}
		defer u.Close()
		fmt.Println("squatting")
		untilStdinEnds()
		return nil
	}
	// An echo that forks a child which keeps every descriptor, and lives on.
	roles["fork"] = func() error {
		return serveRole(func(p *peer) {
			keep := keepDescriptors()
			sleep := exec.Command("sleep", "60")
			sleep.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: 0}
			sleep.ExtraFiles = keep
			if err := sleep.Start(); err != nil {
				fmt.Println("error", err)
			}
			fmt.Println("forked", sleep.Process.Pid)
			echo(p)
		})
	}
	// An echo that becomes another program.
	roles["exec"] = func() error {
		return serveRole(func(p *peer) {
			var ev session.Event
			p.poll(&ev)
			msg := bytes.Clone(ev.Msg)
			p.Drop()
			p.send(msg)
			syscall.Exec("/bin/sleep", []string{"sleep", "60"}, nil)
		})
	}
	// A flood to whoever connects.
	roles["flood"] = func() error {
		return serveRole(func(p *peer) {
			receiver := make(chan struct{})
			defer func() { <-receiver }()
			go func() {
				defer close(receiver)
				var ev session.Event
				for p.poll(&ev) {
					p.Drop()
				}
			}()
			r := rand.New(rand.NewSource(4))
			for i := uint64(0); ; i++ {
				n := 8 + r.Intn(1<<r.Intn(17))
				n = min(n, ring.MaxMessage)
				buf := p.reserve(n, n)
				if buf == nil {
					return
				}
				pattern(buf, i)
				p.Commit(n)
			}
		})
	}
	// Accepts and holds, with few descriptors to spare.
	roles["hold"] = func() error {
		return serveRole(func(p *peer) {
			var ev session.Event
			for p.poll2(&ev) {
				p.send(ev.Msg)
				p.Drop()
			}
		})
	}
}

// keepDescriptors returns all descriptors of this process, for a child to inherit.
func keepDescriptors() (files []*os.File) {
	names, _ := os.ReadDir("/proc/self/fd")
	for _, n := range names {
		var fd int
		fmt.Sscan(n.Name(), &fd)
		if dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 100); err == nil && fd > 2 {
			files = append(files, os.NewFile(uintptr(dup), n.Name()))
		}
	}
	return files
}

// poll2 waits without the bound of patience.
func (p *peer) poll2(ev *session.Event) bool {
	for {
		p.Arm(session.RecvReady)
		if p.Poll(ev) {
			return true
		}
		if p.Err() != nil {
			return p.Poll(ev)
		}
		<-p.in.woken
	}
}

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
	if d := time.Since(start); d > time.Second {
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
			if err := p.Err(); !errors.Is(err, io.EOF) && !errors.Is(err, errPeerUnread) { // by what of ours it had read
				t.Errorf("the peer's end shows as %v", err)
			}
			if !p.Endpoint.(*endpoint).control.ring[1].Drained() {
				t.Error("not all was read")
			}
		})
	}
}

func TestManyConnectionsTakeFewDescriptors(t *testing.T) {
	const many, few = 2000, 64
	leaks(t)
	c := spawn(t, "hold", func(c *exec.Cmd) {
		c.Path, c.Args = "/bin/sh", []string{"sh", "-c", fmt.Sprintf("ulimit -n %d && exec %s", few, c.Path)}
	})
	first := dialChild(t, c, Config{})
	before := count(t)
	peers := []*peer{first}
	for len(peers) < many {
		ep, err := dial(c.addr, Config{})
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
	if n := after.fds - before.fds; n > many+16 {
		t.Errorf("%d connections take %d descriptors", many, n)
	}
	if n := after.goroutines - before.goroutines; n > 16 {
		t.Errorf("%d connections take %d goroutines", many, n)
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

func TestConnectionsShareOneLink(t *testing.T) {
	leaks(t)
	tcp, l := listen(t, "127.0.0.1:0", Config{})
	var ends []session.Endpoint
	for range 40 { // more than the first segment holds
		a, b := meet(t, tcp, l)
		ends = append(ends, a, b)
	}
	links.mu.Lock()
	n := len(links.all)
	links.mu.Unlock()
	if n != 2 { // its two ends
		t.Errorf("%d links", n)
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
			a, b := meet(t, tcp, l)
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

func TestDialToAStoppedProcessIsBounded(t *testing.T) {
	leaks(t)
	c := spawn(t, "echo", nil)
	first := dialChild(t, c, Config{})
	c.cmd.Process.Signal(syscall.SIGSTOP)
	defer c.cmd.Process.Signal(syscall.SIGCONT)
	var status unix.WaitStatus
	if _, err := unix.Wait4(c.cmd.Process.Pid, &status, unix.WUNTRACED, nil); err != nil || !status.Stopped() {
		t.Fatalf("not stopped: %v, %v", status, err)
	}
	for range 3 {
		ep, err := dial(c.addr, Config{Timeout: 50 * time.Millisecond})
		if err == nil {
			end(ep)
		}
		var u *session.Unavailable
		if !errors.As(err, &u) || u.Reason != session.ReasonTimeout {
			t.Errorf("got %v", err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	fd := bind(t, "127.0.0.1")
	defer unix.Close(fd)
	if _, err := Dial(ctx, fd, c.addr.(*net.TCPAddr), Config{}); err == nil {
		t.Error("dialed although cancelled")
	}
	end(first)
}

// The slot of a dial that gave up is reused once the other end, which accepted too late,
// is done with it as well.
func TestSlotOfADialThatGaveUp(t *testing.T) {
	leaks(t)
	tcp, l := listen(t, "127.0.0.1:0", Config{})
	a, b := meet(t, tcp, l)
	defer end(a)
	defer end(b)
	l.mu.Lock() // nobody is accepted now
	_, err := dial(tcp.Addr(), Config{Timeout: 50 * time.Millisecond})
	l.mu.Unlock()
	var u *session.Unavailable
	if !errors.As(err, &u) || u.Reason != session.ReasonTimeout {
		t.Fatalf("the dial: %v, want %v", err, session.ReasonTimeout)
	}
	late, _, _, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	var ev session.Event
	if late.Poll(&ev) || !errors.Is(late.Err(), syscall.ECONNRESET) {
		t.Errorf("the connection that nobody has: %v", late.Err())
	}
	end(late)
	near := a.(*endpoint).link
	testenv.Eventually(t, patience, func() error {
		near.slots.mu.Lock()
		defer near.slots.mu.Unlock()
		for _, s := range near.slots.list() { // as a dial does that finds none free
			near.slots.reapLocked(s)
		}
		if n := len(near.slots.free); n != firstSlots-1 {
			return fmt.Errorf("%d slots are free, want %d", n, firstSlots-1)
		}
		return nil
	})
}

func TestClosingTheListenerLeavesConnectionsAlone(t *testing.T) {
	leaks(t)
	tcp, l := listen(t, "127.0.0.1:0", Config{})
	a, b := meet(t, tcp, l)
	waiting, err := dial(tcp.Addr(), Config{})
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	p, q, w := newPeer(a), newPeer(b), newPeer(waiting)
	defer end(p)
	defer end(q)
	defer end(w)
	var ev session.Event
	if !p.send([]byte("hello")) || !q.poll(&ev) || string(ev.Msg) != "hello" {
		t.Errorf("the connection ended with the listener: %v", q.Err())
	}
	q.Drop()
	if w.poll(&ev) || !errors.Is(w.Err(), syscall.EPIPE) { // in order: a reset is a refusal
		t.Errorf("a connection that nobody accepted finds %v", w.Err())
	}
	_, err = dial(tcp.Addr(), Config{})
	var u *session.Unavailable
	if !errors.As(err, &u) || u.Reason != session.ReasonNoListener {
		t.Errorf("a dial after Close: %v", err)
	}
	if _, _, _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Accept after Close: %v", err)
	}
	tcp.Close()
	if _, err = dial(tcp.Addr(), Config{}); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("a dial after the TCP listener's Close: %v", err)
	}
}

// A listener that takes over another's socket gets the dials of a process that still has
// connections to the previous one.
func TestListenerTakesOverWhileConnectionsLive(t *testing.T) {
	leaks(t)
	tcp, l := listen(t, "127.0.0.1:0", Config{})
	x, y := meet(t, tcp, l)
	a, b := newPeer(x), newPeer(y)
	defer end(b)
	defer end(a)
	l.Close()
	next, err := Listen(tcp, Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer next.Close()
	for range 2 {
		x, y := meet(t, tcp, next)
		end(y)
		end(x)
	}
	var ev session.Event
	if !a.send([]byte("hello")) || !b.poll(&ev) || string(ev.Msg) != "hello" {
		t.Errorf("the connection of before: %v", b.Err())
	}
	b.Drop()
}

func TestRingGrowsWhileNobodyReadsAndShrinksWhenIdle(t *testing.T) {
	a, b := pair(t, Config{RingMax: 1 << 20})
	s := &a.Endpoint.(*endpoint).out
	msg := make([]byte, 4096)
	sent := 0
	for {
		buf := a.Reserve(len(msg), len(msg))
		if buf == nil {
			break
		}
		pattern(buf, uint64(sent))
		a.Commit(len(buf))
		sent++
	}
	if n := sent * len(msg); n < 9<<20/10 {
		t.Errorf("the ring holds %d bytes of 1 MiB", n)
	}
	if budget.Used() != 1<<20-ring.Start {
		t.Errorf("budget used: %d", budget.Used())
	}
	// Control passes, also when it has to wait for what nobody reads.
	var ev session.Event
	for i := range sent {
		if !b.poll(&ev) {
			t.Fatal(b.Err())
		}
		pattern(msg, uint64(i))
		if !bytes.Equal(ev.Msg, msg) {
			t.Fatalf("message %d is wrong", i)
		}
		b.Keep()
	}
	for i := range 1000 {
		buf := a.reserveControl(session.MaxControl)
		pattern(buf, uint64(i))
		a.CommitControl(len(buf))
		pattern(msg[:session.MaxControl], uint64(i))
		if !b.poll(&ev) || !bytes.Equal(ev.Msg, msg[:session.MaxControl]) {
			t.Fatalf("control message %d is wrong: %v", i, b.Err())
		}
		b.Drop()
	}
	if a.Reserve(len(msg), len(msg)) != nil {
		t.Error("there is room though nothing was released")
	}
	for i := range sent {
		pattern(msg, uint64(i))
		if !bytes.Equal(b.Front(), msg) {
			t.Fatalf("kept message %d is wrong", i)
		}
		b.Release()
	}
	if b.Poll(&ev) {
		t.Errorf("an event too many: %+v", ev)
	}
	testenv.Eventually(t, patience, func() error {
		if n := s.Limit(); n != ring.Start {
			return fmt.Errorf("the ring did not shrink: %d", n)
		}
		return nil
	})
	for i := range 3000 {
		pattern(msg, uint64(i))
		if !a.send(msg) || !b.poll(&ev) || !bytes.Equal(ev.Msg, msg) {
			t.Fatalf("message %d after shrinking: %v %v", i, a.Err(), b.Err())
		}
		b.Drop()
	}
}

// Pages that a connection has faulted in serve the next one, and go if there is none.
func TestFreeSlotStaysWarmAndCools(t *testing.T) {
	leaks(t)
	tcp, l := listen(t, "127.0.0.1:0", Config{})
	first, firstHere := meet(t, tcp, l) // keeps the link
	defer end(first)
	defer end(firstHere)
	k := first.(*endpoint).link
	defer withoutJanitor(k)() // this test is it
	var warm *slot
	use := func(n int) {
		x, y := meet(t, tcp, l)
		if s := x.(*endpoint).slot; warm == nil {
			warm = s
		} else if s != warm {
			t.Fatal("another slot was taken")
		}
		a, b := newPeer(x), newPeer(y)
		msg := make([]byte, session.MaxControl)
		for i := range n {
			pattern(msg, uint64(i))
			if !a.send(msg) {
				t.Fatal(a.Err())
			}
		}
		var ev session.Event
		for i := range n {
			pattern(msg, uint64(i))
			if !b.poll(&ev) || !bytes.Equal(ev.Msg, msg) {
				t.Fatalf("message %d is wrong: %v", i, b.Err())
			}
			b.Drop()
		}
		end(a)
		end(b)
		testenv.Eventually(t, patience, func() error {
			k.slots.mu.Lock()
			defer k.slots.mu.Unlock()
			k.slots.reapLocked(warm) // though the bell may not have been answered
			if !slices.Contains(k.slots.free, warm) {
				return errors.New("the slot is not free")
			}
			return nil
		})
	}
	const many = 1 << 20 / session.MaxControl
	use(many)
	grown := resident(t, warm.rings[0][:])
	if grown < 1<<20 {
		t.Fatalf("%d bytes after a MiB", grown)
	}
	k.slots.reclaim(k.side, k.ended())
	use(1) // keeps them warm, though its own ring has not grown
	for range cacheTicks - 1 {
		if !k.slots.reclaim(k.side, k.ended()) {
			t.Error("the janitor need not come again, though a slot is warm")
		}
		if n := resident(t, warm.rings[0][:]); n != grown {
			t.Errorf("%d of %d bytes are left before their time", n, grown)
		}
	}
	if k.slots.reclaim(k.side, k.ended()) {
		t.Error("the janitor has to come again")
	}
	if n := resident(t, warm.rings[0][:]); n > os.Getpagesize() { // a slice of an array touches it
		t.Errorf("%d bytes are left for nobody", n)
	}
	k.slots.mu.Lock()
	k.slots.free = []*slot{warm}
	k.slots.mu.Unlock()
	use(many) // as good as new
}

// The pages that a connection inherits with a warm slot count in the budget while it has
// them. They go when it idles, or at once if the budget is exceeded.
func TestIdleConnectionOnAWarmSlotCools(t *testing.T) {
	leaks(t)
	for _, room := range []bool{true, false} {
		tcp, l := listen(t, "127.0.0.1:0", Config{})
		first, firstHere := meet(t, tcp, l) // keeps the link
		k := first.(*endpoint).link
		x, y := meet(t, tcp, l)
		a, b := newPeer(x), newPeer(y)
		place := x.(*endpoint).slot
		for range 1 << 20 / session.MaxControl {
			a.send(make([]byte, session.MaxControl))
			b.send(make([]byte, session.MaxControl))
		}
		end(a)
		end(b)
		testenv.Eventually(t, patience, func() error {
			k.slots.mu.Lock()
			defer k.slots.mu.Unlock()
			if k.slots.reapLocked(place); !slices.Contains(k.slots.free, place) {
				return errors.New("the slot is not free")
			}
			return nil
		})
		resume := withoutJanitor(k, firstHere.(*endpoint).link)
		old := budget.Set(defaultBudget)
		if !room {
			budget.Set(0)
		}
		x, y = meet(t, tcp, l)
		budget.Set(old)
		if x.(*endpoint).slot != place {
			t.Fatal("another slot was taken")
		}
		used := budget.Used()
		if least := int64(2 * (1<<20 - ring.Start)); room && used < least || !room && used != 0 {
			t.Errorf("room %v: %d bytes of the budget are taken", room, used)
		}
		if e := x.(*endpoint); room && (!e.shrink() || e.out.Pages() == ring.Start) {
			t.Error("a ring that nobody has looked at before is taken for one that idles")
		}
		resume()
		testenv.Eventually(t, patience, func() error {
			for _, r := range place.rings {
				if n := resident(t, r[:]); n > os.Getpagesize() {
					return fmt.Errorf("%d bytes of an idle connection's ring", n)
				}
			}
			if n := budget.Used(); n != 0 {
				return fmt.Errorf("%d bytes of the budget", n)
			}
			return nil
		})
		for _, e := range []session.Endpoint{x, y, first, firstHere} {
			end(e)
		}
	}
}

// What an ended connection left in its ring counts in the budget of the process that wrote
// it, at either end, exactly as long as the peer may read it.
func TestUnreadRingCountsInTheBudget(t *testing.T) {
	leaks(t)
	for _, dialer := range []bool{true, false} {
		for _, peer := range []string{"reads", "aborts", "dies"} {
			t.Run(fmt.Sprintf("dialer=%v,%s", dialer, peer), func(t *testing.T) {
				tcp, l := listen(t, "127.0.0.1:0", Config{})
				first, firstHere := meet(t, tcp, l) // keeps the link
				defer end(first)
				defer end(firstHere)
				x, y := meet(t, tcp, l)
				if !dialer {
					x, y = y, x
				}
				a, b := newPeer(x), newPeer(y)
				defer end(b)
				e := x.(*endpoint)
				defer withoutJanitor(e.link)() // this test is it
				msg := make([]byte, 4096)
				n := uint64(0)
				for ; e.out.Pages() < 1<<20; n++ {
					pattern(msg, n)
					if !a.send(msg) {
						t.Fatal(a.Err())
					}
				}
				end(a)
				for range cacheTicks + 1 {
					if !e.link.slots.reclaim(e.side, e.link.ended()) {
						t.Error("the janitor need not come again, though the peer may read what is there")
					}
				}
				if used := budget.Used(); used != 1<<20-ring.Start {
					t.Errorf("%d bytes of the budget are taken by a MiB that nobody has read", used)
				}
				var ev session.Event
				for i := uint64(0); peer == "reads" && i < n; i++ {
					pattern(msg, i)
					if !b.poll(&ev) || !bytes.Equal(ev.Msg, msg) {
						t.Fatalf("message %d of %d is wrong: %v", i, n, b.Err())
					}
					b.Drop()
				}
				switch peer {
				case "aborts":
					abort(b)
				case "dies":
					e.link.die(errPeerGone)
				}
				b.Poll(&ev) // says how far it has come
				if e.link.slots.reclaim(e.side, e.link.ended()) {
					t.Error("the janitor has to come again")
				}
				if used := budget.Used(); used != 0 {
					t.Errorf("%d bytes of the budget are taken by what nobody will read", used)
				}
				if n := resident(t, x.(*endpoint).slot.rings[e.side]); n > os.Getpagesize() { // a slice of an array touches it
					t.Errorf("%d bytes are left for nobody", n)
				}
			})
		}
	}
}

// A connection on a slot whose pages the janitor is giving back begins when that is done;
// one that is refused leaves them as they were.
func TestConnectionMeetsTheJanitorOnItsSlot(t *testing.T) {
	leaks(t)
	tcp, l := listen(t, "127.0.0.1:0", Config{Backlog: 1})
	first, firstHere := meet(t, tcp, l) // keeps the link
	defer end(first)
	defer end(firstHere)
	k := firstHere.(*endpoint).link
	defer withoutJanitor(k, first.(*endpoint).link)() // this test is it
	const left = 1 << 20
	next := (k.slots.list())[first.(*endpoint).slot.number+1:][:2]
	for _, s := range next {
		budget.Take(left-ring.Start, true)
		s.pages.put(left)
	}
	if !next[0].pages.bytes.CompareAndSwap(left, reclaiming) {
		t.Fatal("the slot is taken")
	}
	type result struct {
		ep  session.Endpoint
		err error
	}
	dialed := make(chan result)
	go func() {
		ep, err := dial(tcp.Addr(), Config{})
		dialed <- result{ep, err}
	}()
	for range 200_000 { // some ten milliseconds: long enough for one that does not wait
		runtime.Gosched()
	}
	next[0].pages.bytes.Store(left)
	x := <-dialed
	if x.err != nil {
		t.Fatal(x.err)
	}
	defer end(x.ep)
	if _, err := dial(tcp.Addr(), Config{}); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Fatalf("a full backlog: %v", err)
	}
	if n := next[1].pages.bytes.Load(); n != left {
		t.Errorf("a connection that was refused has left %d bytes of %d", n, left)
	}
	y, _, _, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer end(y)
	if e := y.(*endpoint); e.slot != next[0] || e.out.Pages() != left || e.slot.pages.bytes.Load() != 0 {
		t.Errorf("slot %d has %d bytes, %d are left", e.slot.number, e.out.Pages(), e.slot.pages.bytes.Load())
	}
}

// The janitor wakes a sender that may have found it at the ring: nobody else would.
func TestSenderThatFoundTheJanitorIsWoken(t *testing.T) {
	a, b := pair(t, Config{RingMax: 1 << 20})
	e := a.Endpoint.(*endpoint)
	defer withoutJanitor(e.link)() // this test is it
	for e.out.Limit() == ring.Start {
		a.send(make([]byte, 4096))
	}
	for ev := new(session.Event); b.Poll(ev); {
		b.Drop()
	}
	for range 2 { // it has to find the ring as it was
		e.shrink()
	}
	if e.out.Limit() != ring.Start {
		t.Fatal("the ring did not shrink")
	}
	if !a.out.sleep() {
		t.Fatal("nobody said that the janitor is gone")
	}
}

// withoutJanitor keeps the janitor from the links until resume is called.
func withoutJanitor(links ...*link) (resume func()) {
	for _, k := range links {
		r := &k.reclaim
		r.mu.Lock()
		for r.active && !r.timer.Stop() { // it is at work
			r.mu.Unlock()
			runtime.Gosched()
			r.mu.Lock()
		}
		r.active = true
		r.mu.Unlock()
	}
	return func() {
		for _, k := range links {
			r := &k.reclaim
			r.mu.Lock()
			r.active = false
			r.startLocked()
			r.mu.Unlock()
		}
	}
}

// resident is how much of a mapping there is memory for.
func resident(t *testing.T, b []byte) (n int) {
	t.Helper()
	pages := make([]byte, len(b)/os.Getpagesize())
	if _, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)), uintptr(unsafe.Pointer(&pages[0]))); errno != 0 {
		t.Fatal(errno)
	}
	for _, in := range pages {
		n += int(in&1) * os.Getpagesize()
	}
	return n
}
