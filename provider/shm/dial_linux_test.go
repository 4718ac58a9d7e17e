package shm

import (
	"errors"
	"net"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/session"
)

func TestDialReachesTheListenerThatTCPWouldReach(t *testing.T) {
	for _, tc := range []struct{ listen, dial, from string }{
		{"127.0.0.1:0", "127.0.0.1", "127.0.0.1"},
		{"127.0.0.1:0", "127.0.0.1", "127.0.0.7"},
		{"0.0.0.0:0", "127.0.0.1", "127.0.0.1"},
		{"0.0.0.0:0", "127.0.0.9", "127.0.0.1"},
		{"[::]:0", "127.0.0.1", "127.0.0.1"},
		{"[::]:0", "::1", "::1"},
		{"[::1]:0", "::1", "::1"},
	} {
		t.Run(tc.listen+" by "+tc.dial, func(t *testing.T) {
			leaks(t)
			tcp, l := listen(t, tc.listen, Config{})
			to := &net.TCPAddr{IP: net.ParseIP(tc.dial), Port: tcp.Addr().(*net.TCPAddr).Port}
			fd := bind(t, tc.from)
			from, err := boundAddr(fd)
			if err != nil {
				t.Fatal(err)
			}
			a, err := Dial(t.Context(), fd, to, Config{})
			if err != nil {
				t.Fatal(err)
			}
			defer end(a)
			b, local, remote, err := l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer end(b)
			if a.Limits().Provider != Name || b.Limits().Provider != Name {
				t.Error("another provider")
			}
			if local.AddrPort() != unmap(to.AddrPort()) || remote.AddrPort() != from {
				t.Errorf("accepted %v from %v, dialed %v from %v", local, remote, to, from)
			}
			p, q := newPeer(a), newPeer(b)
			p.send([]byte("ping"))
			var ev session.Event
			if !q.poll(&ev) || string(ev.Msg) != "ping" {
				t.Fatalf("got %q, %v", ev.Msg, q.Err())
			}
			q.Drop()
			q.send([]byte("pong"))
			if !p.poll(&ev) || string(ev.Msg) != "pong" {
				t.Fatalf("got %q, %v", ev.Msg, p.Err())
			}
			p.Drop()
		})
	}
}

func TestNobodyListensIsRefused(t *testing.T) {
	leaks(t)
	tcp, l := listen(t, "127.0.0.1:0", Config{})
	l.Close()
	tcp.Close()
	if _, err := dial(tcp.Addr(), Config{}); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("got %v", err)
	}
}

func TestDialSaysWhyNot(t *testing.T) {
	leaks(t)
	plain, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Close()
	fd := bind(t, "127.0.0.1")
	defer unix.Close(fd)
	unbound, _ := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	defer unix.Close(unbound)
	port := plain.Addr().(*net.TCPAddr).Port
	for _, tc := range []struct {
		name   string
		fd     int
		to     net.IP
		reason session.Reason
	}{
		{"plain TCP listener", fd, net.IPv4(127, 0, 0, 1), session.ReasonNoListener},
		{"not loopback", fd, net.IPv4(192, 0, 2, 1), session.ReasonNotServed},
		{"another family", fd, net.IPv6loopback, session.ReasonNotServed},
		{"unbound socket", unbound, net.IPv4(127, 0, 0, 1), session.ReasonNotServed},
		{"no socket", -1, net.IPv4(127, 0, 0, 1), session.ReasonNotServed},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := Dial(t.Context(), tc.fd, &net.TCPAddr{IP: tc.to, Port: port}, Config{})
			var u *session.Unavailable
			if !errors.As(err, &u) || u.Reason != tc.reason {
				t.Errorf("got %v, want %v", err, tc.reason)
			}
		})
	}
}

// A full queue has no room for more: that dialers whom nobody has accepted yet are refused
// is for package san to decide, which knows who has negotiated.
func TestBacklogFull(t *testing.T) {
	leaks(t)
	tcp, l := listen(t, "127.0.0.1:0", Config{Backlog: 2})
	for range 2 {
		ep, err := dial(tcp.Addr(), Config{})
		if err != nil {
			t.Fatal(err)
		}
		defer end(ep)
	}
	_, err := dial(tcp.Addr(), Config{})
	wantReason(t, err, session.ReasonResources)
	ep, _, _, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	end(ep)
	third, err := dial(tcp.Addr(), Config{})
	if err != nil {
		t.Fatalf("after an Accept: %v", err)
	}
	end(third)
}

// What is sent before the connect is there when the connection is accepted; and an endpoint
// that is not connected is given back.
func TestBeginBeforeTheConnect(t *testing.T) {
	leaks(t)
	tcp, l := listen(t, "127.0.0.1:0", Config{Backlog: 1})
	first := []byte("first")
	begun, ended := 0, 0
	cfg := Config{Timeout: patience, Begin: func(ep session.Endpoint) (end func()) {
		begun++
		copy(ep.ReserveControl(len(first)), first)
		ep.CommitControl(len(first))
		return func() {
			ended++
			ep.Abort()
			ep.Retire()
		}
	}}
	a, err := dial(tcp.Addr(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer end(a)
	_, err = dial(tcp.Addr(), cfg)
	wantReason(t, err, session.ReasonResources)
	if begun != 2 || ended != 1 {
		t.Errorf("%d endpoints, of which one was to be connected, and %d ended", begun, ended)
	}
	b, _, _, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer end(b)
	var ev session.Event
	if !b.Poll(&ev) || ev.Kind != session.Message || string(ev.Msg) != string(first) {
		t.Errorf("accepted with %q", ev.Msg)
	}
	b.Drop()
}

// A socket bound to an address that shared memory does not serve is not even offered to
// the listener, which would refuse it.
func TestDialFromAnotherAddress(t *testing.T) {
	tcp, _ := listen(t, "127.0.0.1:0", Config{})
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_FREEBIND, 1); err != nil {
		t.Fatal(err)
	}
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{192, 0, 2, 1}}); err != nil { // TEST-NET-1
		t.Fatal(err)
	}
	ep, err := Dial(t.Context(), fd, tcp.Addr().(*net.TCPAddr), Config{})
	var why *session.Unavailable
	if !errors.As(err, &why) || why.Reason != session.ReasonNotServed {
		t.Errorf("%v, %v; want %v", ep, err, session.ReasonNotServed)
	}
}

// A dialer that looks for the answer in the slot gets a reply only if it is refused; one that
// does not gets one in any case.
func TestRepliesAreSentToThoseWhoWantThem(t *testing.T) {
	leaks(t)
	tcp, l := listen(t, "127.0.0.1:0", Config{})
	s := dialRaw(t, l)
	s.handshake()
	var fds []int
	for range 3 {
		fds = append(fds, bind(t, "127.0.0.1"))
	}
	defer closeAll(fds)
	quiet := message{kind: msgConnect, code: connectQuietly, addr: tcp.Addr().(*net.TCPAddr).AddrPort()}
	s.send(quiet.encode(), fds[0])
	quiet.number = 1
	s.send(quiet.encode()) // without a socket
	s.send(connectTo(tcp, 2), fds[2])
	for _, want := range []message{{number: 1, code: codeAddress}, {number: 2, code: codeOK}} {
		var m message
		if _, err := receive(s.conn, &m); err != nil || m.kind != msgConnectReply || m.number != want.number || m.code != want.code {
			t.Errorf("answered %+v, %v; want %+v", m, err, want)
		}
	}
	for range 2 {
		b, _, _, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		if e := b.(*endpoint); e.local.accepted.Load() != 1 {
			t.Errorf("slot %d does not show that it is accepted", e.slot.number)
		}
		end(b)
	}
}

// An acceptor may reply instead of showing the answer in the slot.
func TestAcceptorsMayReply(t *testing.T) {
	leaks(t)
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer tcp.Close()
	welcome := message{kind: msgLinkReply, version: version}
	serveRendezvous(t, tcp, answerLink(welcome, func(c *net.UnixConn) {
		var m message
		fds, _ := receive(c, &m)
		closeAll(fds)
		send(c, &message{kind: msgConnectReply, number: m.number})
		silent(c)
	}, doorbellEnd(t)))
	a, err := dial(tcp.Addr(), Config{Timeout: patience})
	if err != nil {
		t.Fatal(err)
	}
	end(a)
}

// A dial sleeps if polling does not help, until the answer comes.
func TestDialSleepsUntilItIsAnswered(t *testing.T) {
	leaks(t)
	tcp, l := listen(t, "127.0.0.1:0", Config{Timeout: patience})
	a, b := meet(t, tcp, l)
	defer end(b)
	defer end(a)
	k := a.(*endpoint).link
	k.answers.mu.Lock() // nobody polls
	defer k.answers.mu.Unlock()
	l.mu.Lock() // nobody is accepted
	dialed := make(chan error, 1)
	go func() {
		c, err := dial(tcp.Addr(), Config{Timeout: patience})
		if err == nil {
			defer end(c)
		}
		dialed <- err
	}()
	testenv.Eventually(t, patience, func() error {
		if s := k.slots.at(1); s.control.ring[1].WakeReader() { // it has armed; and may sleep
			s.ep.Load().Arm(session.RecvReady)
			return nil
		}
		return errors.New("it has not armed")
	})
	l.mu.Unlock()
	if err := <-dialed; err != nil {
		t.Error(err)
	}
	c, _, _, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	end(c)
}
