package shm

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/provider/shm/internal/ring"
	"github.com/sanconn/san/session"
)

// Tests with two processes run this test binary again, in a role.
const roleVariable = "SAN_SHM_TEST_ROLE"

// roles are what a child process can do. A role writes lines for its parent to stdout, and ends when
// stdin does.
var roles = map[string]func() error{
	"echo": echoRole,
	"dial": dialRole,
}

func TestMain(m *testing.M) {
	tick = 20 * time.Millisecond
	idleTicks[1] = 1000 // so long that no test's peer reaches it
	role := os.Getenv(roleVariable)
	if role == "" {
		os.Exit(m.Run())
	}
	if err := roles[role](); err != nil {
		fmt.Println("error", err)
		os.Exit(1)
	}
}

// child is another process.
type child struct {
	at    place // where an echo child listens, once it has printed that
	role  string
	cmd   *exec.Cmd
	lines *bufio.Reader
	stdin io.Closer
}

// spawn starts a child in a role. change may change how it is started.
func spawn(t testing.TB, role string, change func(*exec.Cmd), env ...string) *child {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(append(os.Environ(), roleVariable+"="+role), env...)
	cmd.Stderr = os.Stderr
	if change != nil {
		change(cmd)
	}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		stdin.Close()
		stdout.Close()
		if cmd.SysProcAttr != nil && cmd.SysProcAttr.Cloneflags != 0 && errors.Is(err, syscall.EPERM) {
			testenv.Missing(t, "namespaces, which a container or a chroot may forbid")
		}
		t.Fatalf("starting the %s child: %v", role, err)
	}
	c := &child{role: role, cmd: cmd, lines: bufio.NewReader(stdout), stdin: stdin}
	t.Cleanup(c.kill)
	return c
}

func (c *child) kill() {
	c.cmd.Process.Kill()
	c.stdin.Close()
	c.cmd.Wait()
}

// line reads the next line. Its first word must be the expected one; line returns the rest.
func (c *child) line(t testing.TB, word string) string {
	t.Helper()
	type result struct {
		line string
		err  error
	}
	got := make(chan result, 1)
	go func() {
		line, err := c.lines.ReadString('\n')
		got <- result{strings.TrimSpace(line), err}
	}()
	select {
	case r := <-got:
		first, rest, _ := strings.Cut(r.line, " ")
		if r.err != nil || first != word {
			t.Fatalf("the %s child said %q (%v), not %q", c.role, r.line, r.err, word)
		}
		return rest
	case <-time.After(patience):
		testenv.Hung(t, c.role, c.cmd, fmt.Sprintf("say %q", word))
		return ""
	}
}

// untilStdinEnds lets the parent decide when a role ends.
func untilStdinEnds() { io.Copy(io.Discard, os.Stdin) }

// echoRole sends every message back.
func echoRole() error { return serveRole(echo) }

// serveRole listens, prints where, and serves each connection.
func serveRole(serve func(*peer)) error {
	return serveRoleAs(serve, func() error { return nil })
}

// serveRoleAs does what serveRole does in a process that becomes another user once it listens.
func serveRoleAs(serve func(*peer), become func() error) error {
	port, err := rolePort()
	if err != nil {
		return err
	}
	l, err := Listen(port, Config{Dir: os.Getenv("DIR")}, func(ep session.Endpoint) {
		go func() {
			p := newPeer(ep)
			defer end(p)
			serve(p)
		}()
	})
	if err != nil {
		return err
	}
	if err := become(); err != nil {
		return err
	}
	fmt.Println("listening", place{port, l.name, uint32(os.Geteuid())})
	untilStdinEnds()
	return nil
}

// rolePort returns PORT, or a free port if it is not set.
func rolePort() (port uint16, err error) {
	if at := os.Getenv("PORT"); at != "" {
		_, err = fmt.Sscan(at, &port)
		return port, err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return uint16(l.Addr().(*net.TCPAddr).Port), nil
}

// echo drops each message before it answers. So it has read everything if it is killed after the answer.
func echo(p *peer) {
	var ev session.Event
	var msg []byte
	for p.poll(&ev) {
		msg = append(msg[:0], ev.Msg...)
		p.Drop()
		if !p.send(msg) {
			return
		}
	}
}

// dialRole dials PLACE, and prints the result, and then whether an echo came back.
func dialRole() error {
	at, err := parsePlace(os.Getenv("PLACE"))
	if err != nil {
		return err
	}
	ep, err := dial(at, Config{})
	var u *session.Unavailable
	switch {
	case errors.As(err, &u):
		fmt.Printf("unavailable %v\n", u.Reason)
		return nil
	case err != nil:
		return err
	}
	p := newPeer(ep)
	fmt.Println("dialed")
	var ev session.Event
	if !p.send([]byte("hello")) || !p.poll(&ev) || string(ev.Msg) != "hello" {
		return fmt.Errorf("no echo: %v", p.Err())
	}
	p.Drop()
	fmt.Println("echoed")
	untilStdinEnds()
	end(p)
	return nil
}

// placeOf returns where a child listens.
func placeOf(t testing.TB, c *child) place {
	t.Helper()
	at, err := parsePlace(c.line(t, "listening"))
	if err != nil {
		t.Fatal(err)
	}
	return at
}

// dialChild connects to an echo child.
func dialChild(t testing.TB, c *child, cfg Config) *peer {
	t.Helper()
	c.at = placeOf(t, c)
	cfg.timeout = patience
	ep, err := dial(c.at, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { end(ep) })
	return newPeer(ep)
}

func TestTwoProcessesEcho(t *testing.T) {
	leaks(t)
	p := dialChild(t, spawn(t, "echo", nil), Config{})
	const count = 20000
	size := func(r *rand.Rand) int { return 1 + r.Intn(1<<r.Intn(17)) }
	sender := make(chan struct{})
	defer func() { <-sender }()
	go func() {
		defer close(sender)
		r := rand.New(rand.NewSource(2))
		for i := range count {
			n := size(r)
			buf := p.reserve(n, n)
			if buf == nil {
				return
			}
			pattern(buf, uint64(i))
			p.Commit(n)
		}
	}()
	r := rand.New(rand.NewSource(2))
	want := make([]byte, ring.MaxMessage)
	var ev session.Event
	for i := range count {
		n := size(r)
		pattern(want[:n], uint64(i))
		if !p.poll(&ev) || !bytes.Equal(ev.Msg, want[:n]) {
			t.Fatalf("message %d: %v", i, p.Err())
		}
		p.Drop()
	}
}

func TestKilledPeerIsEOFAfterItsBytes(t *testing.T) {
	leaks(t)
	c := spawn(t, "echo", nil)
	p := dialChild(t, c, Config{})
	var ev session.Event
	if !p.send([]byte("last words")) || !p.poll(&ev) { // then it has read them
		t.Fatal(p.Err())
	}
	c.cmd.Process.Kill()
	c.cmd.Wait()
	for more := true; more; more = p.poll(&ev) {
		if string(ev.Msg) != "last words" {
			t.Errorf("got %q", ev.Msg)
		}
		p.Drop()
	}
	if !errors.Is(p.Err(), io.EOF) {
		t.Errorf("the peer's end shows as %v", p.Err())
	}
	if p.Reserve(1, 1) != nil {
		t.Error("there is room to a peer that is gone")
	}
}
