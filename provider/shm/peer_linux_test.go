package shm

import (
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/session"
)

func asThis(*exec.Cmd) {}

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
	if os.Geteuid() != 0 {
		t.Fatal("needs root, to be other users")
	}
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

const someone = 1234 // a user

// Who may dial us.
func TestPeersOfOtherUsersAndNamespacesDial(t *testing.T) {
	place := runnable(t)
	for _, tc := range []struct {
		name     string
		dialer   func(*exec.Cmd)
		wantDial string // what the dialing child says
	}{
		{"same user", asThis, "dialed"},
		{"another user", asUser(someone), "dialed"},
		{"user namespace of ours", inNamespaces(syscall.CLONE_NEWUSER, 0), "dialed"},
		{"user namespace of another", inNamespaces(syscall.CLONE_NEWUSER, someone), "unavailable owner mismatch"},
		{"invisible process", inNamespaces(syscall.CLONE_NEWUSER|syscall.CLONE_NEWPID, 0), "dialed"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			leaks(t)
			tcp, l := listen(t, "127.0.0.1:0", Config{})
			c := spawn(t, "dial", func(c *exec.Cmd) { place(c); tc.dialer(c) }, "ADDRESS="+tcp.Addr().String())
			if tc.wantDial == "dialed" {
				echoUntilItEnds(t, l, c)
			} else if got := "unavailable " + c.line(t, "unavailable"); got != tc.wantDial {
				t.Errorf("the child says %q, not %q", got, tc.wantDial)
			}
		})
	}
}

// echoUntilItEnds serves a child that dials, which is then killed.
func echoUntilItEnds(t *testing.T, l *Listener, c *child) {
	t.Helper()
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
}

// Whom we may dial.
func TestPeersOfOtherUsersAndNamespacesListen(t *testing.T) {
	place := runnable(t)
	nobody := session.ReasonNone // one user, where all are known
	if !knowsAllUsers() {
		nobody = session.ReasonOwner
	}
	for _, tc := range []struct {
		name     string
		listener func(*exec.Cmd)
		reason   session.Reason
	}{
		{"same user", asThis, session.ReasonNone},
		{"another user", asUser(someone), session.ReasonNone},
		{"user namespace", inNamespaces(syscall.CLONE_NEWUSER, someone), session.ReasonNone},
		{"invisible to the other", inNamespaces(syscall.CLONE_NEWUSER|syscall.CLONE_NEWPID, someone), session.ReasonNone},
		{"nobody", asUser(overflowUID), nobody},
	} {
		t.Run(tc.name, func(t *testing.T) {
			leaks(t)
			c := spawn(t, "echo", func(c *exec.Cmd) { place(c); tc.listener(c) })
			addr, err := net.ResolveTCPAddr("tcp", c.line(t, "listening"))
			if err != nil {
				t.Fatal(err)
			}
			ep, err := dial(addr, Config{})
			if tc.reason != session.ReasonNone {
				wantReason(t, err, tc.reason)
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
}

func TestASquatterIsNotTrusted(t *testing.T) {
	place := runnable(t)
	leaks(t)
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer tcp.Close()
	c := spawn(t, "squat", func(c *exec.Cmd) { place(c); asUser(someone)(c) }, "NAME="+rendezvousOf(t, tcp).Name)
	c.line(t, "squatting")
	_, err = dial(tcp.Addr(), Config{})
	wantReason(t, err, session.ReasonOwner)
}
