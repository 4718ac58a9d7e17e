package san

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/finding"
	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/reason"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/provider/shm"
	"github.com/sanconn/san/session"
)

// Which process accepts a connection is the kernel's choice, and the connection moves to that
// one, whatever others have the same socket or the same port.

// reusePort has listeners share a port.
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

// … and each of another user than the socket's: root listens, and a worker without its rights
// accepts. The dialers are root's, the worker's user's.
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

// Processes share a port by SO_REUSEPORT; when one has ended, the others serve.
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

// Processes take over a listener from each other while it is dialed. Nobody is refused, none is
// lost, and each moves, also if its process has closed the listener meanwhile.
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

// A process that is killed takes the connections with it that it has accepted, and no others:
// the next are answered by the one behind, and move.
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

// A listener that accepts one connection and is closed: the connection moves all the same, as
// long as it is open.
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
		wantMoved(t, c, shm.Name)
		wantMoved(t, s, shm.Name)
		send(t, s, c, "by shm")
		c.Close()
		s.Close()
		waitFor(t, "the name to be given up", func() bool {
			ep, err := shm.Dial(t.Context(), l.Addr().(*net.TCPAddr).AddrPort().Port(), 0, uint32(os.Getuid()), shm.Config{})
			if err == nil {
				ep.Abort()
				ep.Retire()
			}
			return reason.Is(err, ReasonNoListener)
		})
	}
}

var movingLane = lane{moving: true}

// However many of the processes that share a socket have ended, the one that is left is found.
func TestTheLastOfManyIsFound(t *testing.T) {
	tcp := plainListen(t, "127.0.0.1:0")
	var all []*process
	for i := range finding.GapMost + 3 {
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

// … and so is one behind a gap, while those of another process before it are found at once: what
// finds its process has not looked behind the gap.
func TestFoundBehindAGap(t *testing.T) {
	onlyShm(t)
	tcp := plainListen(t, "127.0.0.1:0")
	var all []*process
	for i := range finding.GapMost + 1 {
		all = append(all, startServer(t, tcp, byte(i)))
	}
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.2:"+portOf(tcp.Addr().String()))
	for _, p := range all[1:] {
		p.Process.Kill()
		p.ended(t)
	}
	if by, err := exchange(atOnce(), tcp.Addr().String()); err != nil || by.provider != shm.Name {
		t.Fatalf("%+v, %v", by, err)
	}
	c := mustDial(t, new(Dialer), l.Addr().String())
	s := mustAccept(t, l)
	newconn.HandleOf(c).CallUse(0)
	send(t, c, s, "a use")
	waitFor(t, "an attempt", func() bool { return !isUndecided(c) })
	wantMoved(t, c, shm.Name)
}

// A listener for whose process no name is left is found once there is one, and so are the
// connections that it has accepted by then.
func TestANameIsTriedAgain(t *testing.T) {
	onlyShm(t)
	for what, dir := range map[string]string{"here": "", "in the directory": t.TempDir()} {
		t.Run(what, func(t *testing.T) {
			var plain net.ListenConfig
			plain.SetMultipathTCP(false)
			made, err := plain.Listen(t.Context(), "tcp", "0.0.0.0:0")
			if err != nil {
				t.Fatal(err)
			}
			tcp := made.(*net.TCPListener)
			port := uint16(tcp.Addr().(*net.TCPAddr).Port)
			var others []*shm.Listener
			for range shm.Numbers {
				other, err := shm.Listen(port, shm.Config{Dir: dir}, func(session.Endpoint) {}) // which never answers
				if err != nil {
					t.Fatal(err)
				}
				defer other.Close()
				others = append(others, other)
			}
			before := Stats().Listeners[ReasonResources]
			l, err := (&ListenConfig{ShmDir: dir}).Adopt(tcp)
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			if why := l.Unavailable()[shm.Name]; why == nil || why.Reason != ReasonResources || len(l.Providers()) != 0 && dir == "" {
				t.Fatalf("it has %v, and lacks %v", l.Providers(), l.Unavailable())
			}
			if n := Stats().Listeners[ReasonResources] - before; n != 1 {
				t.Errorf("%d listeners lack something", n)
			}
			c := mustDial(t, new(Dialer), fmt.Sprintf("127.0.0.1:%d", port))
			s := mustAccept(t, l)
			for _, other := range others { // to which a dial would wait for an answer
				other.Close()
			}
			waitFor(t, "the listener to have all", func() bool { return len(l.Unavailable()) == 0 && len(l.Providers()) == 1 })
			movingLane.begin(c)
			for range 3 {
				send(t, c, s, string(randomBytes(200_000)))
			}
			wantMoved(t, s, shm.Name)
		})
	}
}
