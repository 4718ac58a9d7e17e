package tcpid

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/testenv"
)

func TestMain(m *testing.M) {
	if os.Getenv(acceptAs) != "" {
		acceptChild()
		return
	}
	os.Exit(m.Run())
}

func TestPeerIsTheOtherEnd(t *testing.T) {
	for _, tt := range []struct{ name, listen, dial string }{
		{"IPv4", "127.0.0.1", "127.0.0.1"},
		{"another address of lo", "0.0.0.0", "127.1.2.3"},
		{"IPv6", "::1", "::1"},
		{"IPv4 to both", "::", "127.0.0.1"},
		{"IPv6 to both", "::", "::1"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, mptcp := range []bool{false, true} { // package net's listeners use it by default
				var lc net.ListenConfig
				lc.SetMultipathTCP(mptcp)
				l := listenWith(t, &lc, "tcp", net.JoinHostPort(tt.listen, "0"))
				_, port, _ := net.SplitHostPort(l.Addr().String())
				d := dial(t, net.JoinHostPort(tt.dial, port))
				wantPeers(t, d, accept(t, l))
			}
		})
	}
}

// An IPv6 socket that is connected to an IPv4 address, which package net does not make, finds its peer.
func TestPeerOfMappedAddress(t *testing.T) {
	for _, to := range []string{"127.0.0.1:0", "[::]:0"} {
		l := listen(t, "tcp", to)
		fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		f := os.NewFile(uintptr(fd), "")
		defer f.Close()
		mapped := netip.MustParseAddr("::ffff:127.0.0.1").As16()
		port := l.Addr().(*net.TCPAddr).Port
		if err := unix.Connect(fd, &unix.SockaddrInet6{Addr: mapped, Port: port}); err != nil {
			t.Fatal(err)
		}
		c, err := net.FileConn(f)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		wantPeers(t, c.(*net.TCPConn), accept(t, l))
	}
}

func TestPeerInBacklogAndAfterClose(t *testing.T) {
	l := listen(t, "tcp", "127.0.0.1:0")
	d := dial(t, l.Addr().String())
	waiting := peer(t, d)
	if waiting.Accepted || waiting.Cookie == 0 {
		t.Errorf("in the backlog: %+v", waiting)
	}
	a := accept(t, l)
	if s := peer(t, d); !s.Accepted || s.Cookie != waiting.Cookie || s.Cookie != cookie(t, a) {
		t.Errorf("accepted: %+v, before %+v", s, waiting)
	}
	a.CloseWrite()
	if s := peer(t, d); !s.Accepted {
		t.Errorf("half closed: %+v", s)
	}
	a.Close()
	if s, err := Peer(d); err == nil && s.Accepted {
		t.Errorf("closed: %+v", s)
	} else if err != nil && !errors.Is(err, ErrNotHere) {
		t.Error(err)
	}
	e, err := EndsOf(d)
	d.Close()
	if _, err := Peer(d); !errors.Is(err, net.ErrClosed) {
		t.Errorf("asked by a closed connection: %v", err)
	}
	if again, err2 := EndsOf(d); err != nil || err2 != nil || e != again {
		t.Errorf("a closed connection's ends: %v, %v; before %v, %v", again, err2, e, err)
	}
}

// After the connection has gone, the kernel finds the listener, which is not a peer.
func TestListenerIsNoPeer(t *testing.T) {
	l := listen(t, "tcp", "127.0.0.1:0")
	d, a := connect(t, l)
	e, err := EndsOf(d)
	if err != nil {
		t.Fatal(err)
	}
	o, err := control(d, ownOf)
	if err != nil {
		t.Fatal(err)
	}
	a.SetLinger(0)
	a.Close() // resets d
	if s, err := peerOf(e, o); !errors.Is(err, ErrNotHere) {
		t.Errorf("%+v, %v", s, err)
	}
}

// acceptAs has the user as which a child accepts from the listener that is its descriptor 3.
const acceptAs = "TCPID_TEST_ACCEPT_AS"

func acceptChild() {
	var uid int
	fmt.Sscan(os.Getenv(acceptAs), &uid)
	fmt.Println("ready") // it runs as the user that has started it
	bufio.NewReader(os.Stdin).ReadString('\n')
	l, err := net.FileListener(os.NewFile(3, ""))
	if err == nil {
		err = syscall.Setuid(uid)
	}
	if err == nil {
		_, err = l.Accept()
	}
	fmt.Println("accepted", err)
	io.Copy(io.Discard, os.Stdin)
}

func TestPeerIsOfWhoAccepts(t *testing.T) {
	testenv.NeedRoot(t)
	l := listen(t, "tcp", "127.0.0.1:0")
	f, err := l.File()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	const uid = 12345
	child := exec.CommandContext(t.Context(), "/proc/self/exe")
	child.Env = append(os.Environ(), fmt.Sprint(acceptAs, "=", uid))
	child.ExtraFiles = []*os.File{f}
	child.Stderr = os.Stderr
	in, _ := child.StdinPipe()
	out, _ := child.StdoutPipe()
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	defer child.Wait()
	defer in.Close()
	said := bufio.NewReader(out)
	hear := func(want string) {
		t.Helper()
		if line, err := said.ReadString('\n'); line != want+"\n" {
			t.Fatalf("the child says %q, %v", line, err)
		}
	}
	hear("ready")
	d := dial(t, l.Addr().String())
	if s := peer(t, d); s.Accepted {
		t.Fatalf("before: %+v", s)
	}
	fmt.Fprintln(in)
	hear("accepted <nil>")
	if s := peer(t, d); !s.Accepted || s.UID != uid {
		t.Errorf("%+v, want user %d", s, uid)
	}
}

// The user of a socket that has just been accepted is never the one from before.
func TestUserOfOneJustAccepted(t *testing.T) {
	testenv.NeedRoot(t)
	const nobody, rounds = 65534, 2000
	l := listen(t, "tcp", "127.0.0.1:0")
	f, err := l.File()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	dialed, accepted := make(chan struct{}), make(chan int)
	go func() {
		defer close(accepted)
		runtime.LockOSThread() // for good: the user is the thread's
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, nobody, nobody, nobody); errno != 0 {
			t.Error(errno)
			return
		}
		for range dialed {
			fd, _, err := unix.Accept4(int(f.Fd()), unix.SOCK_CLOEXEC)
			if err != nil {
				t.Error(err)
				return
			}
			accepted <- fd
		}
	}()
	defer close(dialed)
	for range rounds {
		d := dial(t, l.Addr().String())
		dialed <- struct{}{}
		s := peer(t, d)
		for !s.Accepted {
			s = peer(t, d)
		}
		fd, ok := <-accepted
		unix.Close(fd)
		d.Close()
		if s.UID != nobody || !ok {
			t.Fatalf("%+v, want user %d", s, nobody)
		}
	}
}

// With Multipath TCP at both ends, the programs' sockets are not those of the TCP connection, and each
// end detects that.
func TestMultipathTCP(t *testing.T) {
	var lc net.ListenConfig
	lc.SetMultipathTCP(true)
	l := listenWith(t, &lc, "tcp", "127.0.0.1:0")
	var nd net.Dialer
	nd.SetMultipathTCP(true)
	d := dialWith(t, &nd, l.Addr().String())
	a := accept(t, l)
	if yes, err := d.MultipathTCP(); !yes {
		testenv.Missing(t, fmt.Sprintf("Multipath TCP: %v", err))
	}
	for _, c := range [][2]*net.TCPConn{{d, a}, {a, d}} {
		if s, err := Peer(c[0]); err == nil && s.Cookie == cookie(t, c[1]) {
			t.Errorf("its cookie is that of the connection: %+v", s)
		} else {
			t.Logf("%+v, %v; cookie %d", s, err, cookie(t, c[1]))
		}
	}
	if err := SaveSYN(l); !errors.Is(err, ErrMPTCP) {
		t.Errorf("SaveSYN: %v", err)
	}
	if _, err := DialerStamps(d, time.Time{}); !errors.Is(err, ErrMPTCP) {
		t.Errorf("DialerStamps: %v", err)
	}
	if _, err := acceptorStamp(a); !errors.Is(err, ErrMPTCP) {
		t.Errorf("acceptorStamp: %v", err)
	}
	if _, _, err := Positions(d); !errors.Is(err, ErrMPTCP) {
		t.Errorf("Positions: %v", err)
	}
	// The client uses Multipath TCP, the server plain TCP.
	plain := listen(t, "tcp", "127.0.0.1:0")
	d = dialWith(t, &nd, plain.Addr().String())
	a = accept(t, plain)
	if s := peer(t, a); s.Cookie == cookie(t, d) {
		t.Errorf("its cookie is that of the connection: %+v", s)
	}
}

func TestPeerIsTheProxy(t *testing.T) {
	l := listen(t, "tcp", "127.0.0.1:0")
	proxy := listen(t, "tcp", "127.0.0.1:0")
	for _, l := range []*net.TCPListener{l, proxy} {
		if err := SaveSYN(l); err != nil {
			t.Fatal(err)
		}
	}
	d, in := connect(t, proxy)
	out, a := connect(t, l)
	wantPeers(t, d, in)
	if s := peer(t, d); s.Cookie == cookie(t, a) {
		t.Error("the peer is the server behind the proxy")
	}
	if s := peer(t, a); s.Cookie != cookie(t, out) {
		t.Error("the peer is not the proxy")
	}
	if sd, sa := dialerStamp(t, d), mustAcceptorStamp(t, a); proven(sd, sa) {
		t.Errorf("stamps %d and %d prove one connection of two", sd, sa)
	}
}

func TestTranslatedAddressIsNotHere(t *testing.T) {
	n := newNamespace(t)
	n.need(t, `
		nft add table ip n
		nft 'add chain ip n out { type nat hook output priority -100; }'
		nft add rule ip n out tcp dport 7001 redirect to :7002
		nft add rule ip n out ip daddr 127.9.9.9 tcp dport 7003 dnat to 127.0.0.1:7002`)
	n.do(t, func() {
		l := listen(t, "tcp", "127.0.0.1:7002")
		if err := SaveSYN(l); err != nil {
			t.Fatal(err)
		}
		for _, to := range []string{"127.0.0.1:7001", "127.9.9.9:7003"} {
			d, a := wantProof(t, func() (dialed, accepted *net.TCPConn) { return dial(t, to), accept(t, l) }) // it is one connection
			if s, err := Peer(d); !errors.Is(err, ErrNotHere) {
				t.Errorf("%s: the dialer finds %+v, %v", to, s, err)
			}
			// The acceptor's peer has connected to another address.
			if s, err := Peer(a); !errors.Is(err, ErrNotHere) {
				t.Errorf("%s: the acceptor finds %+v, %v", to, s, err)
			}
		}
		d, a := connect(t, l)
		wantPeers(t, d, a)
	})
}

func TestPeerByLinkLocalAddress(t *testing.T) {
	n := newNamespace(t)
	n.need(t, "ip link add d0 index 5 type veth peer name d1")
	n.script(t, "ip link set d0 up; ip link set d1 up; ip addr add fe80::5/64 dev d0 nodad")
	n.do(t, func() {
		l := listen(t, "tcp", "[fe80::5%5]:0")
		d, a := connect(t, l)
		wantPeers(t, d, a)
		l = listen(t, "tcp", "[::]:0")
		d = dial(t, fmt.Sprintf("[fe80::5%%5]:%d", l.Addr().(*net.TCPAddr).Port))
		wantPeers(t, d, accept(t, l))
	})
}

// A dialer that is bound to an interface finds its peer. The peer, which is not bound, does not find the
// dialer.
func TestPeerOfBoundSocket(t *testing.T) {
	n := newNamespace(t)
	n.need(t, "ip link add d0 index 5 type veth peer name d1")
	n.script(t, "ip link set d0 up; ip link set d1 up; ip addr add fd00::5/64 dev d0 nodad")
	bind := func(to string) *net.Dialer {
		return &net.Dialer{Control: func(_, _ string, rc syscall.RawConn) (err error) {
			rc.Control(func(fd uintptr) { err = unix.BindToDevice(int(fd), to) })
			return err
		}}
	}
	n.do(t, func() {
		l := listen(t, "tcp", "[::]:0")
		port := l.Addr().(*net.TCPAddr).Port
		d := dialWith(t, bind("lo"), fmt.Sprintf("127.0.0.1:%d", port))
		wantPeers(t, d, accept(t, l))
		d = dialWith(t, bind("d0"), fmt.Sprintf("[fd00::5]:%d", port))
		a := accept(t, l)
		if s := peer(t, d); s.Cookie != cookie(t, a) {
			t.Errorf("found %+v", s)
		}
		if s, err := Peer(a); !errors.Is(err, ErrNotHere) {
			t.Errorf("found %+v, %v", s, err)
		}
	})
}

func TestPeerInAnotherNamespace(t *testing.T) {
	a, b := newNamespace(t), newNamespace(t)
	join(t, a, b)
	for _, to := range []string{"10.0.0.2:7000", "[fd00::2]:7000", "[fe80::2%7]:7000"} {
		var l *net.TCPListener
		var dialed, accepted *net.TCPConn
		b.do(t, func() { l = listen(t, "tcp", to) })
		a.do(t, func() { dialed = dial(t, to) })
		b.do(t, func() { accepted = accept(t, l) })
		for n, c := range map[*namespace]*net.TCPConn{a: dialed, b: accepted} {
			n.do(t, func() {
				if s, err := Peer(c); !errors.Is(err, ErrNotHere) || errors.Is(err, errNotThisThread) {
					t.Errorf("%s: found %+v, %v", to, s, err)
				}
			})
		}
		ea, err1 := EndsOf(dialed)
		eb, err2 := EndsOf(accepted)
		if err1 != nil || err2 != nil || ea != eb.Reversed() {
			t.Errorf("%s: ends %v, %v and %v, %v", to, ea, err1, eb, err2)
		}
	}
}

func TestThreadInAnotherNamespace(t *testing.T) {
	n := newNamespace(t)
	var l *net.TCPListener
	var d, a *net.TCPConn
	n.do(t, func() {
		l = listen(t, "tcp", "127.0.0.1:0")
		d, a = connect(t, l)
		wantPeers(t, d, a)
	})
	if s, err := Peer(d); !errors.Is(err, errNotThisThread) {
		t.Errorf("asked from elsewhere: %+v, %v", s, err)
	}
	if release, err := Hold(l); !errors.Is(err, errNotThisThread) {
		release()
		t.Errorf("held from elsewhere: %v", err)
	}
	var release func()
	n.do(t, func() {
		var err error
		if release, err = Hold(l); err != nil {
			t.Fatal(err)
		}
	})
	wantPeers(t, d, a)
	more, err := Hold(d)
	if err != nil {
		t.Fatal(err)
	}
	release()
	release()
	wantPeers(t, d, a)
	more()
	if s, err := Peer(d); !errors.Is(err, errNotThisThread) {
		t.Errorf("asked from elsewhere, behind the release: %+v, %v", s, err)
	}
	if len(askers.by) != 0 {
		t.Errorf("kept: %v", askers.by)
	}
}

// Before Linux 5.14 the kernel does not report a socket's network namespace.
func TestKernelWithoutNumbersOfNamespaces(t *testing.T) {
	n := newNamespace(t)
	ask := func(c *net.TCPConn) (Socket, error) {
		e, err := EndsOf(c)
		if err != nil {
			t.Fatal(err)
		}
		return peerOf(e, own{iface: loopbackIndex, cookie: cookie(t, c)})
	}
	n.do(t, func() {
		l := listen(t, "tcp", "127.0.0.1:0")
		d, a := connect(t, l)
		if s, err := ask(d); err != nil || s.Cookie != cookie(t, a) {
			t.Errorf("%+v, %v", s, err)
		}
	})
	// The same addresses exist in two namespaces.
	connectAs := func() *net.TCPConn {
		l := listen(t, "tcp", "127.0.0.1:7000")
		from := &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 6000}
		d := dialWith(t, &net.Dialer{LocalAddr: from}, l.Addr().String())
		accept(t, l)
		return d
	}
	var d *net.TCPConn
	n.do(t, func() { d = connectAs() })
	newNamespace(t).do(t, func() {
		if s, err := ask(d); !errors.Is(err, ErrNotHere) {
			t.Errorf("%+v, %v", s, err)
		}
		connectAs()
		if s, err := ask(d); !errors.Is(err, errNotThisThread) {
			t.Errorf("%+v, %v", s, err)
		}
	})
}

func TestEndsOfUnconnected(t *testing.T) {
	if e, err := EndsOf(new(net.TCPConn)); err == nil {
		t.Errorf("%v", e)
	}
}

// A thousand goroutines ask at the same time, and afterwards nothing holds the namespace.
func TestManyAsk(t *testing.T) {
	l := listen(t, "tcp", "127.0.0.1:0")
	d, a := connect(t, l)
	want := cookie(t, a)
	results := make(chan error)
	const many = 1000
	for range many {
		go func() {
			s, err := Peer(d)
			if err == nil && s.Cookie != want {
				err = fmt.Errorf("found %+v", s)
			}
			results <- err
		}()
	}
	for range many {
		if err := <-results; err != nil {
			t.Error(err)
		}
	}
	if len(askers.by) != 0 {
		t.Errorf("kept: %v", askers.by)
	}
}

func BenchmarkPeer(b *testing.B) {
	l := listen(b, "tcp", "127.0.0.1:0")
	d, _ := connect(b, l)
	run := func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := Peer(d); err != nil {
				b.Fatal(err)
			}
		}
	}
	b.Run("alone", run)
	release, err := Hold(l)
	if err != nil {
		b.Fatal(err)
	}
	defer release()
	b.Run("held", run)
}

func BenchmarkCookie(b *testing.B) {
	l := listen(b, "tcp", "127.0.0.1:0")
	d, _ := connect(b, l)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := Cookie(d); err != nil {
			b.Fatal(err)
		}
	}
}
