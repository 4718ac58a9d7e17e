package shm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/session"
)

func asThis(*exec.Cmd) {}

func asUser(id uint32) func(*exec.Cmd) {
	return func(c *exec.Cmd) {
		c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: id, Gid: id}}
	}
}

// inNamespaces starts a child in new namespaces, in which it is root. Outside it is user.
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

// runnable copies the test binary to a place from which every user may run it.
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

const someone = 1234 // a user other than the tests'

// Processes of other users, and in other namespaces, dial this process.
func TestPeersOfOtherUsersAndNamespacesDial(t *testing.T) {
	run := runnable(t)
	for _, tc := range []struct {
		name     string
		dialer   func(*exec.Cmd)
		ours     uint32 // this user's id in the child's namespace
		wantDial string // what the dialing child prints
	}{
		{"same user", asThis, 0, "dialed"},
		{"another user", asUser(someone), 0, "dialed"},
		{"user namespace of ours", inNamespaces(syscall.CLONE_NEWUSER, 0), 0, "dialed"},
		{"user namespace of another", inNamespaces(syscall.CLONE_NEWUSER, someone), overflowUID, "unavailable owner mismatch"},
		{"invisible process", inNamespaces(syscall.CLONE_NEWUSER|syscall.CLONE_NEWPID, 0), 0, "dialed"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			leaks(t)
			l := listen(t, Config{})
			at := l.at
			at.user = tc.ours
			c := spawn(t, "dial", func(c *exec.Cmd) { run(c); tc.dialer(c) }, "PLACE="+at.String())
			if tc.wantDial == "dialed" {
				echoUntilItEnds(t, l, c)
			} else if got := "unavailable " + c.line(t, "unavailable"); got != tc.wantDial {
				t.Errorf("the child says %q, not %q", got, tc.wantDial)
			}
		})
	}
}

// echoUntilItEnds serves a child that dials, and that is then killed.
func echoUntilItEnds(t *testing.T, l *served, c *child) {
	t.Helper()
	ep, err := l.accept()
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

// Processes of other users, and in other namespaces, listen, and this process dials them.
func TestPeersOfOtherUsersAndNamespacesListen(t *testing.T) {
	run := runnable(t)
	nobody := session.ReasonNone // a user like others, if this namespace knows all users
	if !knowsAllUsers() {
		nobody = session.ReasonOwner
	}
	for _, tc := range []struct {
		name     string
		listener func(*exec.Cmd)
		peerUser uint32
		reason   session.Reason
	}{
		{"same user", asThis, 0, session.ReasonNone},
		{"another user", asUser(someone), someone, session.ReasonNone},
		{"user namespace that does not know us", inNamespaces(syscall.CLONE_NEWUSER, someone), someone, session.ReasonOwner},
		{"invisible to the other", inNamespaces(syscall.CLONE_NEWUSER|syscall.CLONE_NEWPID, 0), 0, session.ReasonNone},
		{"nobody", asUser(overflowUID), overflowUID, nobody},
	} {
		t.Run(tc.name, func(t *testing.T) {
			leaks(t)
			c := spawn(t, "echo", func(c *exec.Cmd) { run(c); tc.listener(c) })
			at := placeOf(t, c)
			at.user = tc.peerUser
			ep, err := dial(at, Config{})
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

// A process of another user that has taken a name receives no packet, and costs the dial no time.
func TestASquatterIsNotTrusted(t *testing.T) {
	run := runnable(t)
	leaks(t)
	port := freePort(t)
	at := place{port, prefixOf("", port) + "0123456789abcdef", uint32(os.Geteuid())}
	c := spawn(t, "squat", func(c *exec.Cmd) { run(c); asUser(someone)(c) }, "NAME="+at.name)
	c.line(t, "squatting")
	_, err := dial(at, Config{})
	wantReason(t, err, session.ReasonOwner)
	l := listenAt(t, at.port, Config{})
	if names := at.names(t, ""); !slices.Equal(names, []string{l.name}) {
		t.Errorf("there are %q, of which %s is not the squatter's", names, l.name)
	}
	at.user = someone
	if names := at.names(t, ""); len(names) != 2 && os.Geteuid() == 0 {
		t.Errorf("the squatter's own, and root's that may be: %q", names)
	}
	if got := c.line(t, "came"); got != "0 bytes" {
		t.Errorf("the squatter got %s", got)
	}
}

func init() {
	// Listens as root, and then becomes USER.
	roles["drop"] = func() error {
		return serveRoleAs(echo, dropPrivileges)
	}
	// Connects as root, and then becomes USER.
	roles["dial-drop"] = func() error {
		at, err := parsePlace(os.Getenv("PLACE"))
		if err != nil {
			return err
		}
		conn, err := at.connect("")
		if err != nil {
			return err
		}
		if err := dropPrivileges(); err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		l, err := dialLink(ctx, conn, at.user, Config{}.withDefaults())
		if err != nil {
			return err
		}
		l.start(nil)
		e, err := l.dial(ctx)
		if err != nil {
			return err
		}
		fmt.Println("dialed")
		untilStdinEnds()
		end(e)
		return nil
	}
}

// dropPrivileges makes the process continue as another user.
func dropPrivileges() error { return errors.Join(syscall.Setgid(someone), syscall.Setuid(someone)) }

// A process that has listened as root, and then dropped its privileges, counts as a process of its
// present user, not as root's.
func TestListenerThatHasDroppedItsPrivileges(t *testing.T) {
	testenv.NeedRoot(t)
	leaks(t)
	c := spawn(t, "drop", nil)
	at := placeOf(t, c)
	if at.user != someone {
		t.Fatalf("it is user %d", at.user)
	}
	asRoot := at
	asRoot.user = 0
	_, err := dial(asRoot, Config{})
	wantReason(t, err, session.ReasonOwner)
	asAnother := at
	asAnother.user++
	_, err = dial(asAnother, Config{})
	wantReason(t, err, session.ReasonOwner)
	ep, err := dial(at, Config{})
	if err != nil {
		t.Fatal(err)
	}
	p := newPeer(ep)
	defer end(p)
	if got := PeerUser(ep); got != someone {
		t.Errorf("user %d", got)
	}
	var ev session.Event
	if !p.send([]byte("hello")) || !p.poll(&ev) || string(ev.Msg) != "hello" {
		t.Fatalf("no echo: %v", p.Err())
	}
	p.Drop()
}

// The same for a dialer.
func TestDialerThatHasDroppedItsPrivileges(t *testing.T) {
	testenv.NeedRoot(t)
	leaks(t)
	l := listen(t, Config{})
	c := spawn(t, "dial-drop", nil, "PLACE="+l.at.String())
	c.line(t, "dialed")
	b, err := l.accept()
	if err != nil {
		t.Fatal(err)
	}
	defer end(b)
	if got := PeerUser(b); got != someone {
		t.Errorf("user %d", got)
	}
}

// A process of another user than the dialer looks for may have passed something to the dialer before it
// is found out. Closing that may take long, so the dial does not wait for it.
func TestWhoIsNotLookedForIsHungUpLater(t *testing.T) {
	testenv.NeedRoot(t)
	withLimits(t, startLimits)
	port := freePort(t)
	at := place{port, prefixOf("", port) + "0123456789abcdef", someone + 1}
	var u *net.UnixListener
	var err error
	listening := make(chan struct{})
	go func() {
		defer close(listening)
		runtime.LockOSThread() // never unlocked, so the thread ends with the goroutine
		unix.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), someone, ^uintptr(0))
		u, err = listenUnix(at.name)
	}()
	if <-listening; err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	release := make(chan struct{})
	for range closerThreads {
		accountOf(someone).closeLater(func() { <-release })
	}
	_, err = Dial(t.Context(), at.port, at.name, at.user, Config{timeout: patience})
	wantReason(t, err, session.ReasonOwner)
	if n := held.descriptors.Used(); n != closerThreads+1 {
		t.Errorf("%d wait to be closed, want %d", n, closerThreads+1)
	}
	close(release)
	testenv.Eventually(t, patience, func() error {
		if n := held.descriptors.Used(); n != 0 {
			return fmt.Errorf("%d have not been closed", n)
		}
		return nil
	})
}
