package tcpid

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/testenv"
)

// limit bounds every wait of these tests.
const limit = 20 * time.Second

// listen opens a listener of plain TCP.
func listen(t testing.TB, network, address string) *net.TCPListener {
	t.Helper()
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	return listenWith(t, &lc, network, address)
}

func listenWith(t testing.TB, lc *net.ListenConfig, network, address string) *net.TCPListener {
	t.Helper()
	l, err := lc.Listen(t.Context(), network, address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l.(*net.TCPListener)
}

func dial(t testing.TB, address string) *net.TCPConn {
	t.Helper()
	return dialWith(t, &net.Dialer{}, address)
}

func dialWith(t testing.TB, d *net.Dialer, address string) *net.TCPConn {
	t.Helper()
	d.Timeout = limit
	c, err := d.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c.(*net.TCPConn)
}

func accept(t testing.TB, l *net.TCPListener) *net.TCPConn {
	t.Helper()
	l.SetDeadline(time.Now().Add(limit))
	c, err := l.AcceptTCP()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// connect returns both ends of a connection to a listener.
func connect(t testing.TB, l *net.TCPListener) (dialed, accepted *net.TCPConn) {
	t.Helper()
	dialed = dial(t, l.Addr().String())
	return dialed, accept(t, l)
}

func cookie(t testing.TB, c *net.TCPConn) uint64 {
	t.Helper()
	n, err := Cookie(c)
	if err != nil || n == 0 {
		t.Fatalf("cookie %d, %v", n, err)
	}
	return n
}

func peer(t testing.TB, c *net.TCPConn) Socket {
	t.Helper()
	s, err := Peer(c)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// wantPeers fails unless each end finds the other one.
func wantPeers(t testing.TB, a, b *net.TCPConn) {
	t.Helper()
	uid := uint32(os.Getuid())
	if got, want := peer(t, a), (Socket{cookie(t, b), uid, true}); got != want {
		t.Errorf("the peer of %v is %+v, want %+v", a.LocalAddr(), got, want)
	}
	if got, want := peer(t, b), (Socket{cookie(t, a), uid, true}); got != want {
		t.Errorf("the peer of %v is %+v, want %+v", b.LocalAddr(), got, want)
	}
	ea, err1 := EndsOf(a)
	eb, err2 := EndsOf(b)
	if err1 != nil || err2 != nil || ea != eb.Reversed() {
		t.Errorf("ends %v, %v and %v, %v", ea, err1, eb, err2)
	}
}

// namespace is a network namespace, represented by a thread in it.
type namespace struct {
	tid   int
	calls chan func()
}

// newNamespace makes a network namespace with a loopback interface that is up. It ends with the test,
// unless something that was made in it still exists.
func newNamespace(t *testing.T) *namespace {
	t.Helper()
	testenv.NeedRoot(t)
	n := &namespace{calls: make(chan func())}
	failed, ended := make(chan error), make(chan struct{})
	go func() {
		defer close(ended)
		runtime.LockOSThread() // for good: the thread ends with the goroutine
		n.tid = unix.Gettid()
		failed <- unix.Unshare(unix.CLONE_NEWNET)
		for call := range n.calls {
			call()
		}
	}()
	t.Cleanup(func() { close(n.calls); <-ended })
	if err := <-failed; err != nil {
		testenv.Missing(t, fmt.Sprintf("a network namespace: %v", err))
	}
	n.script(t, "ip link set lo up")
	return n
}

// do calls f in the namespace. A failure of the test there ends the test here.
func (n *namespace) do(t testing.TB, f func()) {
	t.Helper()
	done := make(chan bool, 1)
	n.calls <- func() {
		ok := false
		defer func() { done <- ok }() // even if f ends the goroutine
		f()
		ok = true
	}
	if !<-done {
		t.FailNow()
	}
}

// script runs shell commands in the namespace.
func (n *namespace) script(t testing.TB, commands string) {
	t.Helper()
	var out []byte
	var err error
	n.do(t, func() { out, err = exec.Command("sh", "-ec", commands).CombinedOutput() })
	if err != nil {
		t.Fatalf("%s: %v: %s", commands, err, out)
	}
}

// need runs shell commands, and ends the test as testenv.Missing does if they fail: a command may be
// missing, or something in the kernel.
func (n *namespace) need(t testing.TB, commands string) {
	t.Helper()
	var out []byte
	var err error
	n.do(t, func() { out, err = exec.Command("sh", "-ec", commands).CombinedOutput() })
	if err != nil {
		testenv.Missing(t, fmt.Sprintf("%s: %v: %s", strings.TrimSpace(commands), err, out))
	}
}

// join connects two namespaces: 10.0.0.1, fd00::1 and fe80::1 in a, and those with 2 in b,
// on interface 7 of both.
func join(t testing.TB, a, b *namespace) {
	t.Helper()
	a.need(t, fmt.Sprintf("ip link add v0 index 7 type veth peer name v0 index 7 netns %d", b.tid))
	for i, n := range []*namespace{a, b} {
		n.script(t, strings.ReplaceAll(`
			ip link set v0 up
			ip addr add 10.0.0.N/24 dev v0
			ip addr add fd00::N/64 dev v0 nodad
			ip addr add fe80::N/64 dev v0 nodad`, "N", fmt.Sprint(i+1)))
	}
}
