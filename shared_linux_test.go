package san

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/provider/shm"
)

// Tests of processes that share a socket or a port. The kernel chooses which of them accepts a
// connection, and the connection moves to that process.

// reusePort makes listeners that share a port.
var reusePort = net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
	return errors.Join(c.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
	}), err)
}}

// Several processes accept from one socket that they have inherited.
func TestPrefork(t *testing.T) {
	tcp := plainListen(t, "127.0.0.1:0")
	const processes = 3
	for name := range byte(processes) {
		startServer(t, tcp, name)
	}
	load := startLoad(t, atOnce(), tcp.Addr().String())
	for name := range byte(processes) {
		load.wantMore(t, shm.Name, name)
	}
	load.end()
	load.wantNoneBy(t, providerTCP)
}

// The same, with processes of another user than the socket's: root listens, and workers without its
// rights accept. The dialers are processes of root and of the workers' user.
func TestPreforkOfAnotherUser(t *testing.T) {
	testenv.NeedRoot(t)
	tcp := plainListen(t, "127.0.0.1:0")
	startServer(t, tcp, 0, asNobody)
	startServer(t, tcp, 1, asNobody)
	load := startLoad(t, atOnce(), tcp.Addr().String())
	load.wantMore(t, shm.Name, 0)
	load.wantMore(t, shm.Name, 1)
	load.end()
	load.wantNoneBy(t, providerTCP)
	t.Log(startProcess(t, "load", moves, tcp.Addr().String(), asNobody).line(t))
}

// Processes share a port by SO_REUSEPORT. When one has ended, the others serve.
func TestReusePort(t *testing.T) {
	named := func(name byte) func(*exec.Cmd) {
		return func(c *exec.Cmd) { c.Env = append(c.Env, fmt.Sprintf("%s=%d", envName, name)) }
	}
	first := startProcess(t, "serve", moves, "127.0.0.1:0", named(0))
	address := first.line(t)
	for name := range byte(2) {
		p := startProcess(t, "serve", moves, address, named(name+1))
		if got := p.line(t); got != address {
			t.Fatalf("it serves %s", got)
		}
	}
	load := startLoad(t, atOnce(), address)
	for name := range byte(3) {
		load.wantMore(t, shm.Name, name)
	}
	load.end()
	load.wantNoneBy(t, providerTCP)

	first.Process.Kill()
	first.ended(t)
	load = startLoad(t, atOnce(), address)
	load.wantMore(t, shm.Name, 1)
	load.wantMore(t, shm.Name, 2)
	load.end()
	load.wantNoneBy(t, providerTCP)
}

// Processes take over a listener from each other while clients dial. No dial is refused, no connection
// is lost, and each moves, even if its process has closed the listener in the meantime.
func TestProcessTakesOver(t *testing.T) {
	tcp := plainListen(t, "127.0.0.1:0")
	old := startServer(t, tcp, 0)
	load := startLoad(t, atOnce(), tcp.Addr().String())
	const turns = 4
	for name := range byte(turns) {
		load.wantMore(t, shm.Name, name)
		next := startServer(t, tcp, name+1)
		load.wantMore(t, shm.Name, name)
		if err := old.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		load.wantMore(t, shm.Name, name+1)
		if err := old.ended(t); err != nil {
			t.Errorf("process %d: %v", name, err)
		}
		old = next
	}
	load.end()
	load.wantNoneBy(t, providerTCP)
}

// When a process is killed, the connections that it has accepted end, and no others. The next ones are
// accepted by its successor, and move.
func TestKilledProcessIsTakenOverFrom(t *testing.T) {
	tcp := plainListen(t, "127.0.0.1:0")
	old := startServer(t, tcp, 0)
	const turns = 4
	for name := range byte(turns) {
		if by, err := exchange(atOnce(), tcp.Addr().String()); err != nil || by.name != name || by.provider != shm.Name {
			t.Errorf("before: %+v, %v", by, err)
		}
		old.Process.Kill()
		old.ended(t)
		old = startServer(t, tcp, name+1)
	}
}

// A listener accepts one connection and is closed: the connection can still move, as long as it is open.
func TestMoveAfterTheListenerIsClosed(t *testing.T) {
	onlyShm(t)
	for _, policy := range []Policy{Prefer, Require} {
		l := mustListen(t, &ListenConfig{Policy: policy}, "tcp", "127.0.0.1:0")
		d := &Dialer{Policy: policy}
		c := mustDial(t, d, l.Addr().String())
		s := mustAccept(t, l)
		l.Close()
		movingLane.begin(c)
		for range 3 {
			send(t, c, s, string(randomBytes(200_000)))
		}
		wantMovedByUse(t, c, s, shm.Name)
		wantMoved(t, s, shm.Name)
		send(t, s, c, "by shm")
		c.Close()
		s.Close()
		waitFor(t, "the name to be given up", func() bool { return len(namesOf(t, l.Addr())) == 0 })
	}
}

// namesOf returns the names under which processes are found for a listener's port.
func namesOf(t testing.TB, at net.Addr) []string {
	t.Helper()
	names, err := shm.Names(t.Context(), at.(*net.TCPAddr).AddrPort().Port(), uint32(os.Getuid()), shm.Config{})
	if err != nil {
		t.Error(err)
	}
	return names
}

// When the program forgets a listener, it is closed, as net's is, and not found any more. A connection
// that it has accepted stays open, and its process is found for that.
func TestForgottenListenerIsClosed(t *testing.T) {
	onlyShm(t)
	for _, of := range []struct {
		policy  Policy
		accepts bool
	}{{Prefer, false}, {Prefer, true}, {Require, false}, {Require, true}} {
		var at net.Addr
		var c, s net.Conn
		func() {
			l, err := (&ListenConfig{Policy: of.policy}).Listen(t.Context(), "tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			if at = l.Addr(); len(namesOf(t, at)) != 1 {
				t.Errorf("found by %v", namesOf(t, at))
			}
			if of.accepts {
				c, s = mustDial(t, &Dialer{Policy: of.policy}, at.String()), mustAccept(t, l)
			}
			runtime.KeepAlive(l)
		}()
		waitFor(t, fmt.Sprintf("TCP's end, with %v", of.policy), func() bool {
			runtime.GC()
			tcp, err := net.Dial("tcp", at.String())
			if err == nil {
				tcp.Close()
			}
			return err != nil
		})
		if of.accepts {
			wantMovedByUse(t, c, s, shm.Name)
			s.Close()
		}
		waitFor(t, "the name to be given up", func() bool {
			runtime.GC()
			return len(namesOf(t, at)) == 0
		})
	}
}

// A listener is not forgotten while a call of Accept waits, even if nothing else refers to it.
func TestListenerThatAcceptsIsNotForgotten(t *testing.T) {
	onlyShm(t)
	for _, policy := range []Policy{Prefer, Require} {
		accepted := make(chan net.Conn, 1)
		listen := func(accepts bool) net.Addr {
			l, err := (&ListenConfig{Policy: policy}).Listen(t.Context(), "tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			if accepts {
				go func() {
					c, err := l.Accept()
					if err != nil {
						t.Error(err)
					}
					accepted <- c
				}()
			}
			return l.Addr()
		}
		at, other := listen(true), listen(false)
		waitFor(t, fmt.Sprintf("another one to be forgotten, with %v", policy), func() bool {
			runtime.GC()
			return len(namesOf(t, other)) == 0
		})
		c := mustDial(t, &Dialer{Policy: policy}, at.String())
		if s := <-accepted; s != nil {
			wantMovedByUse(t, c, s, shm.Name)
			s.Close()
		}
	}
}

var movingLane = lane{moving: true}

// However many of the processes that share a socket have ended, the remaining one is found.
func TestTheLastOfManyIsFound(t *testing.T) {
	tcp := plainListen(t, "127.0.0.1:0")
	var all []*process
	for i := range 7 {
		all = append(all, startServer(t, tcp, byte(i)))
	}
	last := len(all) - 1
	for _, p := range all[:last] {
		p.Process.Kill()
		p.ended(t)
	}
	for range 3 {
		if by, err := exchange(atOnce(), tcp.Addr().String()); err != nil || by.provider != shm.Name || by.name != byte(last) {
			t.Errorf("%+v, %v", by, err)
		}
	}
}

// If there is no room in the directory for a process's name, the process is found once there is room,
// also for connections that it has accepted before.
func TestANameIsTriedAgain(t *testing.T) {
	testenv.NeedRoot(t)
	onlyShm(t)
	dir := t.TempDir()
	if err := unix.Mount("none", dir, "tmpfs", 0, "mode=700,nr_inodes=2"); err != nil { // one inode for the directory, and one more
		testenv.Missing(t, "a file system of its own: "+err.Error())
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	var single net.ListenConfig
	single.SetMultipathTCP(false)
	tcp, err := single.Listen(t.Context(), "tcp", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	before := Stats().Listeners[ReasonResources]
	l := mustAdopt(t, &ListenConfig{ShmDir: dir}, tcp.(*net.TCPListener))
	if why := l.Unavailable()[shm.Name]; why == nil || why.Reason != ReasonResources {
		t.Fatalf("it has %v, and lacks %v", l.Providers(), l.Unavailable())
	}
	if n := Stats().Listeners[ReasonResources] - before; n != 1 {
		t.Errorf("%d listeners lack something", n)
	}
	c := mustDial(t, new(Dialer), "127.0.0.1:"+portOf(tcp.Addr().String()))
	s := mustAccept(t, l)
	if err := unix.Mount("none", dir, "tmpfs", unix.MS_REMOUNT, "mode=700,nr_inodes=100"); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the listener to have all", func() bool { return len(l.Unavailable()) == 0 && len(l.Providers()) == 1 })
	wantMovedByUse(t, c, s, shm.Name)
	wantMoved(t, s, shm.Name)
}
