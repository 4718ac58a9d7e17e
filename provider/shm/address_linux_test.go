package shm

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"runtime"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/session"
)

func TestAddressesThatThePeerDoesNotHoldAreRefused(t *testing.T) {
	leaks(t)
	tcp, l := listen(t, "127.0.0.1:0", Config{})
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	sock := func(family, kind int) int {
		fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(fd) })
		return fd
	}
	good, wildcard, six := bind(t, "127.0.0.1"), bind(t, "0.0.0.0"), bind(t, "::1")
	udp := sock(unix.AF_INET, unix.SOCK_DGRAM)
	unix.Bind(udp, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}})
	t.Cleanup(func() { closeAll([]int{pipe[0], pipe[1], good, wildcard, six}) })
	for _, tc := range []struct {
		name string
		fds  []int
	}{
		{"no socket", nil},
		{"a pipe", pipe[:1]},
		{"two sockets", []int{good, good}},
		{"UDP", []int{udp}},
		{"unix", []int{sock(unix.AF_UNIX, unix.SOCK_STREAM)}},
		{"not bound", []int{sock(unix.AF_INET, unix.SOCK_STREAM)}},
		{"bound to the wildcard", []int{wildcard}},
		{"of another family", []int{six}},
		{"of another network namespace", []int{bindElsewhere(t)}},
		{"accepted", []int{acceptedSocket(t, false)}},
		{"accepted, and reset", []int{acceptedSocket(t, true)}},
		{"accepted, and cut", []int{disconnect(t, acceptedSocket(t, false))}},
		{"of a listener", []int{socketOf(t, tcp)}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			wantRefused(t, l, tcp.Addr().(*net.TCPAddr).AddrPort(), tc.fds...)
		})
	}
	servesOthers(t, tcp, l)
}

func TestAddressesThatAreNotTheListenersAreRefused(t *testing.T) {
	leaks(t)
	tcp, l := listen(t, "127.0.0.1:0", Config{})
	port := tcp.Addr().(*net.TCPAddr).AddrPort().Port()
	bound := bind(t, "127.0.0.1")
	defer unix.Close(bound)
	for name, to := range map[string]netip.AddrPort{
		"another port":      netip.MustParseAddrPort("127.0.0.1:1"),
		"another address":   netip.AddrPortFrom(netip.MustParseAddr("127.0.0.2"), port),
		"a distant address": netip.AddrPortFrom(netip.MustParseAddr("192.0.2.1"), port),
	} {
		t.Run(name, func(t *testing.T) { wantRefused(t, l, to, bound) })
	}
	servesOthers(t, tcp, l)
}

// wantRefused dials an address with sockets that do not serve for that.
func wantRefused(t *testing.T, l *Listener, to netip.AddrPort, fds ...int) {
	t.Helper()
	s := dialRaw(t, l)
	s.handshake()
	s.send((&message{kind: msgConnect, number: 3, addr: to}).encode(), fds...)
	var m message
	if _, err := receive(s.conn, &m); err != nil || m.kind != msgConnectReply || m.number != 3 || m.code != codeAddress {
		t.Errorf("answered %+v, %v", m, err)
	}
}

// acceptedSocket returns a socket that a server accepted. It keeps the server's address
// even when the connection is gone.
func acceptedSocket(t *testing.T, reset bool) int {
	t.Helper()
	server, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	client, err := net.Dial("tcp4", server.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	c, err := server.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if reset {
		client.(*net.TCPConn).SetLinger(0)
		client.Close()
		c.SetReadDeadline(time.Now().Add(patience))
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Fatal(err)
		}
	}
	return socketOf(t, c.(*net.TCPConn))
}

// disconnect ends a socket's connection, but leaves it its address.
func disconnect(t *testing.T, fd int) int {
	t.Helper()
	var none unix.RawSockaddr
	none.Family = unix.AF_UNSPEC
	if _, _, errno := unix.Syscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&none)), unsafe.Sizeof(none)); errno != 0 {
		t.Fatal(errno)
	}
	return fd
}

// socketOf returns a descriptor of a connection or a listener.
func socketOf(t *testing.T, c interface{ File() (*os.File, error) }) int {
	t.Helper()
	f, err := c.File()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return int(f.Fd())
}

// If the TCP listener takes no IPv4, ours takes none either, whatever a dialer says.
func TestAListenerOfIPv6AloneTakesNoIPv4(t *testing.T) {
	leaks(t)
	for _, alone := range []bool{false, true} {
		tcp, l := listen(t, "[::]:0", Config{V6Only: alone})
		to := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), uint16(tcp.Addr().(*net.TCPAddr).Port))
		fd := bind(t, "127.0.0.1")
		defer unix.Close(fd)
		s := dialRaw(t, l)
		s.handshake()
		s.send((&message{kind: msgConnect, number: 3, addr: to}).encode(), fd)
		var m message
		fds, err := receive(s.conn, &m)
		closeAll(fds)
		want := uint8(codeOK)
		if alone {
			want = codeAddress
		}
		if err != nil || m.kind != msgConnectReply || m.code != want {
			t.Errorf("IPv6 alone: %v: answered %+v, %v; want code %d", alone, m, err, want)
		}
	}
}

// bindElsewhere binds a socket in a network namespace of its own. The thread
// that went there ends with its goroutine.
func bindElsewhere(t *testing.T) int {
	t.Helper()
	type result struct {
		fd  int
		err error
	}
	done := make(chan result)
	go func() {
		runtime.LockOSThread()
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			done <- result{-1, err}
			return
		}
		fd, err := bindTo("127.0.0.1")
		done <- result{fd, err}
	}()
	r := <-done
	if r.err != nil {
		t.Fatal(r.err)
	}
	t.Cleanup(func() { unix.Close(r.fd) })
	return r.fd
}

// A socket stands for one connection at a time, over whatever slots and links its process
// passes it, and for the next one when that has ended.
func TestOneConnectionBetweenTwoAddresses(t *testing.T) {
	leaks(t)
	tcp, l := listen(t, "127.0.0.1:0", Config{})
	bound := bind(t, "127.0.0.1")
	defer unix.Close(bound)
	dialBound := func(cfg Config) (session.Endpoint, error) {
		own, err := unix.FcntlInt(uintptr(bound), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		ep, err := Dial(t.Context(), own, tcp.Addr().(*net.TCPAddr), cfg)
		if err != nil {
			unix.Close(own)
		}
		return ep, err
	}
	for range 3 {
		a, err := dialBound(Config{})
		if err != nil {
			t.Fatal(err)
		}
		for _, ringMax := range []int{0, minRingMax} { // the same link, another one
			_, err = dialBound(Config{RingMax: ringMax})
			wantReason(t, err, session.ReasonPermission)
		}
		b, _, _, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		end(a)
		defer end(b) // the application has not noticed
	}
}

// A dialer that gives up its socket loses the connection to whoever gets the address: it
// cannot keep others from it.
func TestAddressThatIsGivenUp(t *testing.T) {
	leaks(t)
	tcp, l := listen(t, "127.0.0.1:0", Config{})
	to := tcp.Addr().(*net.TCPAddr)
	a, b := meet(t, tcp, l)
	defer end(a)
	defer end(b)
	at, err := boundAddr(a.(*endpoint).bound)
	if err != nil {
		t.Fatal(err)
	}
	unix.Close(a.(*endpoint).bound)
	a.(*endpoint).bound = -1
	again, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var sa unix.Sockaddr = &unix.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()}
	testenv.Eventually(t, patience, func() error { return unix.Bind(again, sa) }) // the acceptor closes its copy
	c, err := Dial(t.Context(), again, to, Config{})
	if err != nil {
		t.Fatal(err)
	}
	d, _, _, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer end(c)
	defer end(d)
	if !errors.Is(b.Err(), syscall.ECONNRESET) || d.Err() != nil {
		t.Errorf("the old connection: %v, the new one: %v", b.Err(), d.Err())
	}
}
