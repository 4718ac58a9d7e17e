package shm

import (
	"context"
	"errors"
	"io"
	"math"
	"math/rand"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/provider/shm/internal/ring"
	"github.com/sanconn/san/session"
)

// A rawPeer is a peer that the test plays by hand, at a listener's rendezvous.
type rawPeer struct {
	t    *testing.T
	conn *net.UnixConn
}

func dialRaw(t *testing.T, l *Listener) *rawPeer {
	t.Helper()
	name := l.unix.Addr().(*net.UnixAddr)
	c, err := net.DialUnix(name.Net, nil, name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(patience))
	return &rawPeer{t, c}
}

func (s *rawPeer) send(b []byte, fds ...int) {
	s.t.Helper()
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	if _, _, err := s.conn.WriteMsgUnix(b, oob, nil); err != nil && !errors.Is(err, syscall.EPIPE) && !errors.Is(err, syscall.ECONNRESET) {
		s.t.Fatal(err)
	}
}

// hungUp waits for the listener to close the socket, and returns the last
// message that it sent before, if any.
func (s *rawPeer) awaitHangUp() (last message) {
	s.t.Helper()
	for {
		var m message
		fds, err := receive(s.conn, &m)
		closeAll(fds)
		if err != nil {
			if errors.Is(err, os.ErrDeadlineExceeded) {
				s.t.Fatal("the listener did not hang up")
			}
			return last
		}
		last = m
	}
}

// handshake makes the link, as a peer does that keeps to the protocol.
func (s *rawPeer) handshake() {
	s.t.Helper()
	m, fd, err := newSegment(firstSlots)
	if err != nil {
		s.t.Fatal(err)
	}
	m.unmap()
	defer unix.Close(fd)
	s.send(linkRequest(version, firstSlots), fd, doorbellEnd(s.t))
	var reply message
	fds, err := receive(s.conn, &reply)
	closeAll(fds)
	if err != nil || reply.kind != msgLinkReply || reply.code != codeOK || len(fds) != 1 {
		s.t.Fatalf("no link: %+v, %v, %d descriptors", reply, err, len(fds))
	}
}

// linkRequest is the message that asks for a link.
func linkRequest(version, slots uint32) []byte {
	return (&message{kind: msgLink, version: version, number: slots}).encode()
}

// doorbellEnd returns an end of a doorbell to pass to a peer.
func doorbellEnd(t *testing.T) int {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeAll(fds[:]) })
	return fds[0]
}

// stillServes checks that a well-behaved dialer is served at once.
func servesOthers(t *testing.T, tcp net.Listener, l *Listener) {
	t.Helper()
	a, b := meet(t, tcp, l)
	end(b)
	end(a)
}

// memfd makes a memfd with the given size and seals.
func memfd(t *testing.T, size int64, seals, flags int) int {
	t.Helper()
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|flags)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := unix.Ftruncate(fd, size); err != nil {
		t.Fatal(err)
	}
	if seals != 0 {
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
			t.Fatal(err)
		}
	}
	return fd
}

// If a 32-bit process cannot address a segment of a 64-bit peer, the peer has broken no
// rule, and existing connections go on. (Only GOARCH=386 really tests this.)
func TestSegmentBeyondTheAddresses(t *testing.T) {
	l := &link{side: 1}
	have := make([]*slot, mostSlots)
	l.slots.all.Store(&have)
	m, err := l.openSegment(memfd(t, segmentSize(mostSlots), segmentSeals, 0), mostSlots)
	m.unmap()
	if math.MaxInt > math.MaxInt32 {
		if err != nil {
			t.Error(err)
		}
	} else if !errors.Is(err, unix.ENOMEM) || errors.Is(err, errSegment) {
		t.Errorf("%v, want it to be for want of addresses", err)
	}
	m, fd, err := newSegment(mostSlots)
	if err == nil {
		unix.Close(fd)
		m.unmap()
	}
	if math.MaxInt > math.MaxInt32 && err != nil || math.MaxInt == math.MaxInt32 && !errors.Is(err, unix.ENOMEM) {
		t.Errorf("one of this end's: %v", err)
	}
}

func TestSegmentsThatCouldHurtAreRefused(t *testing.T) {
	leaks(t)
	tcp, l := listen(t, "127.0.0.1:0", Config{})
	right := segmentSize(firstSlots)
	file, err := os.Create(filepath.Join(t.TempDir(), "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	file.Truncate(int64(right))
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pipe[0])
	defer unix.Close(pipe[1])
	for _, tc := range []struct {
		name  string
		fd    int
		slots uint32
	}{
		{"unsealed", memfd(t, right, 0, 0), firstSlots},
		{"can shrink", memfd(t, right, unix.F_SEAL_GROW|unix.F_SEAL_SEAL, 0), firstSlots},
		{"can grow", memfd(t, right, unix.F_SEAL_SHRINK|unix.F_SEAL_SEAL, 0), firstSlots},
		{"can be sealed", memfd(t, right, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW, 0), firstSlots},
		{"not writable", memfd(t, right, segmentSeals|unix.F_SEAL_FUTURE_WRITE, 0), firstSlots},
		{"too small", memfd(t, right-pageSize, segmentSeals, 0), firstSlots},
		{"too large", memfd(t, right+pageSize, segmentSeals, 0), firstSlots},
		{"empty", memfd(t, 0, segmentSeals, 0), firstSlots},
		{"fewer slots than are due", memfd(t, segmentSize(1), segmentSeals, 0), 1},
		{"no slots", memfd(t, segmentSize(0), segmentSeals, 0), 0},
		{"too many slots", memfd(t, segmentSize(mostSlots+1), segmentSeals, 0), mostSlots + 1},
		{"endless slots", memfd(t, right, segmentSeals, 0), 1<<32 - 1},
		{"a file", int(file.Fd()), firstSlots},
		{"a pipe", pipe[0], firstSlots},
		{"huge pages", memfd(t, right+(2<<20-right%(2<<20))%(2<<20), segmentSeals, unix.MFD_HUGETLB), firstSlots},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := dialRaw(t, l)
			s.send(linkRequest(version, tc.slots), tc.fd, doorbellEnd(t))
			if last := s.awaitHangUp(); last.kind == msgLinkReply && last.code == codeOK {
				t.Error("welcomed")
			}
			s = dialRaw(t, l)
			s.handshake()
			s.send((&message{kind: msgSegment, number: tc.slots}).encode(), tc.fd)
			s.awaitHangUp()
			servesOthers(t, tcp, l)
		})
	}
}

func TestGarbageOnTheRendezvousEndsItsSenderOnly(t *testing.T) {
	leaks(t)
	tcp, l := listen(t, "127.0.0.1:0", Config{})
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pipe[0])
	defer unix.Close(pipe[1])
	noise := make([]byte, messageSize)
	rand.New(rand.NewSource(3)).Read(noise)
	for _, tc := range []struct {
		name  string
		hello bool // first
		bytes []byte
		fds   []int
	}{
		{"noise", false, noise, nil},
		{"noise with descriptors", false, noise, pipe[:]},
		{"HTTP", false, []byte("GET / HTTP/1.1\r\n\r\n"), nil},
		{"a long packet", false, make([]byte, 100000), nil},
		{"nothing", false, nil, nil},
		{"link without a segment", false, linkRequest(version, firstSlots), nil},
		{"link without a doorbell", false, linkRequest(version, firstSlots), []int{memfd(t, segmentSize(firstSlots), segmentSeals, 0)}},
		{"link with a pipe for a doorbell", false, linkRequest(version, firstSlots), []int{memfd(t, segmentSize(firstSlots), segmentSeals, 0), pipe[1]}},
		{"connect first", false, (&message{kind: msgConnect}).encode(), nil},
		{"link again", true, linkRequest(version, firstSlots), pipe[:1]},
		{"noise later", true, noise, pipe[:]},
		{"a short message", true, (&message{kind: msgConnect}).encode()[:messageSize-1], nil},
		{"a slot that is not there", true, (&message{kind: msgConnect, number: firstSlots}).encode(), nil},
		{"the last slot of all", true, (&message{kind: msgConnect, number: 1<<32 - 1}).encode(), nil},
		{"an acceptor's message", true, (&message{kind: msgConnectReply}).encode(), nil},
		{"an unknown message", true, (&message{kind: 200}).encode(), nil},
		{"more descriptors than a message has", true, (&message{kind: msgConnect, number: firstSlots}).encode(), []int{pipe[0], pipe[1], pipe[0], pipe[1]}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := dialRaw(t, l)
			if tc.hello {
				s.handshake()
			}
			s.send(tc.bytes, tc.fds...)
			s.awaitHangUp()
			servesOthers(t, tcp, l)
		})
	}
}

func TestAddressesThatThePeerDoesNotHoldAreRefused(t *testing.T) {
	leaks(t)
	tcp, l := listen(t, "127.0.0.1:0", Config{})
	here := tcp.Addr().(*net.TCPAddr).AddrPort()
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
	good := bind(t, "127.0.0.1")
	wildcard, six := bind(t, "0.0.0.0"), bind(t, "::1")
	udp := sock(unix.AF_INET, unix.SOCK_DGRAM)
	unix.Bind(udp, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}})
	t.Cleanup(func() { closeAll([]int{pipe[0], pipe[1], good, wildcard, six}) })
	for _, tc := range []struct {
		name string
		fds  []int
		to   string
	}{
		{"no socket", nil, ""},
		{"a pipe", pipe[:1], ""},
		{"two sockets", []int{good, good}, ""},
		{"UDP", []int{udp}, ""},
		{"unix", []int{sock(unix.AF_UNIX, unix.SOCK_STREAM)}, ""},
		{"not bound", []int{sock(unix.AF_INET, unix.SOCK_STREAM)}, ""},
		{"bound to the wildcard", []int{wildcard}, ""},
		{"of another family", []int{six}, ""},
		{"of another network namespace", []int{bindElsewhere(t)}, ""},
		{"accepted", []int{acceptedSocket(t, false)}, ""},
		{"accepted, and reset", []int{acceptedSocket(t, true)}, ""},
		{"accepted, and cut", []int{disconnect(t, acceptedSocket(t, false))}, ""},
		{"of a listener", []int{socketOf(t, tcp)}, ""},
		{"dialed another port", []int{good}, "127.0.0.1:1"},
		{"dialed another address", []int{good}, "127.0.0.2"},
		{"dialed a distant address", []int{good}, "192.0.2.1"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			to := here
			if strings.Contains(tc.to, ":") {
				a, _ := net.ResolveTCPAddr("tcp", tc.to)
				to = unmap(a.AddrPort())
			} else if tc.to != "" {
				to = unmap((&net.TCPAddr{IP: net.ParseIP(tc.to), Port: int(here.Port())}).AddrPort())
			}
			s := dialRaw(t, l)
			s.handshake()
			s.send((&message{kind: msgConnect, number: 3, addr: to}).encode(), tc.fds...)
			var m message
			if _, err := receive(s.conn, &m); err != nil || m.kind != msgConnectReply || m.number != 3 || m.code != codeAddress {
				t.Errorf("answered %+v, %v", m, err)
			}
		})
	}
	servesOthers(t, tcp, l)
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

func TestSlowDialersHoldUpNobody(t *testing.T) {
	leaks(t)
	tcp, l := listen(t, "127.0.0.1:0", Config{})
	for range 50 {
		dialRaw(t, l)
	}
	start := time.Now()
	servesOthers(t, tcp, l)
	if d := time.Since(start); d > handshakeTimeout/2 {
		t.Errorf("a dialer behind slow ones took %v", d)
	}
	l.Close()
	if d := time.Since(start); d > handshakeTimeout*3/4 {
		t.Errorf("Close waited for them: %v", d)
	}
}

// A dialer that connects and says nothing soon loses its place.
func TestMuteDialerIsHungUpOn(t *testing.T) {
	leaks(t)
	tcp, l := listen(t, "127.0.0.1:0", Config{})
	start := time.Now()
	dialRaw(t, l).awaitHangUp()
	if d := time.Since(start); d > patience/2 {
		t.Errorf("it took %v", d)
	}
	servesOthers(t, tcp, l)
}

// asks returns the message that asks a listener for a connection in a slot.
func connectTo(tcp net.Listener, slot uint32) []byte {
	return (&message{kind: msgConnect, number: slot, addr: tcp.Addr().(*net.TCPAddr).AddrPort()}).encode()
}

// connect asks for a connection and returns the listener's end.
func (s *rawPeer) connect(l *Listener, ask []byte, bound int) session.Endpoint {
	s.t.Helper()
	s.send(ask, bound)
	var m message
	if _, err := receive(s.conn, &m); err != nil || m.kind != msgConnectReply || m.code != codeOK {
		s.t.Fatalf("answered %+v, %v", m, err)
	}
	b, _, _, err := l.Accept()
	if err != nil {
		s.t.Fatal(err)
	}
	return b
}

// A slot has one connection at a time, whatever the dialing end asks for.
func TestSlotInUseIsNotConnectedAgain(t *testing.T) {
	leaks(t)
	tcp, l := listen(t, "127.0.0.1:0", Config{})
	bound := bind(t, "127.0.0.1")
	defer unix.Close(bound)
	s := dialRaw(t, l)
	s.handshake()
	b := s.connect(l, connectTo(tcp, 3), bound)
	p := newPeer(b)
	s.send(connectTo(tcp, 3), bound)
	if !p.in.sleep() {
		t.Error("the link lives")
	}
	if err := b.Err(); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the connection: %v", err)
	}
	end(b)
	s.awaitHangUp()
	servesOthers(t, tcp, l)
}

// A peer that ends right after asking for one more connection, and so does not take the
// answer, has not broken the protocol: its other connections end normally.
func TestPeerThatEndsWhileItConnects(t *testing.T) {
	leaks(t)
	tcp, l := listen(t, "127.0.0.1:0", Config{})
	bound := bind(t, "127.0.0.1")
	defer unix.Close(bound)
	for range 20 {
		s := dialRaw(t, l)
		s.handshake()
		b := s.connect(l, connectTo(tcp, 3), bound)
		p := newPeer(b)
		for slot := range uint32(3) {
			s.send(connectTo(tcp, slot), bound)
		}
		s.conn.Close()
		if !p.in.sleep() {
			t.Error("the link lives")
		}
		if err := b.Err(); !errors.Is(err, io.EOF) {
			t.Errorf("the connection: %v", err)
		}
		end(b)
	}
}

// A dialing process that is stopped while more answers are due than its queue can hold
// keeps its connections, and gets the answers when it continues.
func TestAnswersWaitForAStoppedPeer(t *testing.T) {
	leaks(t)
	tcp, l := listen(t, "127.0.0.1:0", Config{})
	bound := bind(t, "127.0.0.1")
	defer unix.Close(bound)
	s := dialRaw(t, l)
	s.handshake()
	b := s.connect(l, connectTo(tcp, 0), bound)
	defer end(b)
	s.conn.SetWriteDeadline(time.Now().Add(3 * handshakeTimeout / 2))
	asked := 0
	for err := error(nil); ; asked++ {
		if _, err = s.conn.Write(connectTo(tcp, 1)); err != nil { // without a socket
			if !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Fatalf("after %d questions: %v", asked, err)
			}
			break
		}
	}
	if err := b.Err(); err != nil {
		t.Errorf("the connection of a peer that is stopped: %v", err)
	}
	for n := range asked {
		var m message
		if _, err := receive(s.conn, &m); err != nil || m.kind != msgConnectReply || m.number != 1 || m.code != codeAddress {
			t.Fatalf("answer %d of %d: %+v, %v", n, asked, m, err)
		}
	}
	s.conn.Close()
}

func TestAnotherVersionIsToldSo(t *testing.T) {
	leaks(t)
	_, l := listen(t, "127.0.0.1:0", Config{})
	s := dialRaw(t, l)
	fd := memfd(t, segmentSize(firstSlots), segmentSeals, 0)
	s.send(linkRequest(version+1, firstSlots), fd, doorbellEnd(t))
	if last := s.awaitHangUp(); last.kind != msgLinkReply || last.code != codeVersion || last.version != version {
		t.Errorf("answered %+v", last)
	}
}

// squat listens at the rendezvous of a plain TCP listener and calls serve for each
// process that connects.
func serveRendezvous(t *testing.T, tcp net.Listener, serve func(*net.UnixConn)) {
	t.Helper()
	name := rendezvousOf(t, tcp)
	u, err := net.ListenUnix(name.Net, name)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := u.AcceptUnix()
			if err != nil {
				return
			}
			serve(c)
			c.Close()
		}
	}()
	t.Cleanup(func() { u.Close(); <-done })
}

func rendezvousOf(t *testing.T, tcp net.Listener) *net.UnixAddr {
	t.Helper()
	rc, err := tcp.(*net.TCPListener).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var inode uint32
	rc.Control(func(fd uintptr) { inode, err = socketInode(int(fd)) })
	if err != nil {
		t.Fatal(err)
	}
	return rendezvous(inode)
}

func TestListenersThatDoNotKeepTheProtocol(t *testing.T) {
	door := doorbellEnd(t)
	welcome := func(m message, then func(*net.UnixConn)) func(*net.UnixConn) {
		return func(c *net.UnixConn) {
			var h message
			fds, _ := receive(c, &h)
			closeAll(fds)
			if m.code == codeOK && m.kind == msgLinkReply {
				send(c, &m, door)
			} else {
				send(c, &m)
			}
			if then != nil {
				then(c)
			}
		}
	}
	silent := func(c *net.UnixConn) { io.Copy(io.Discard, c) }
	for _, tc := range []struct {
		name   string
		serve  func(*net.UnixConn)
		reason session.Reason
	}{
		{"hang up", func(*net.UnixConn) {}, session.ReasonNoListener},
		{"never answer", silent, session.ReasonTimeout},
		{"garbage", func(c *net.UnixConn) { c.Write(make([]byte, 99)); silent(c) }, session.ReasonProtocol},
		{"another message", welcome(message{kind: msgConnectReply}, silent), session.ReasonProtocol},
		{"another version", welcome(message{kind: msgLinkReply, version: version, code: codeVersion}, nil), session.ReasonVersion},
		{"an unknown code", welcome(message{kind: msgLinkReply, version: version, code: 77}, nil), session.ReasonProtocol},
		{"welcome and no more", welcome(message{kind: msgLinkReply, version: version}, silent), session.ReasonTimeout},
		{"answers to nothing", welcome(message{kind: msgLinkReply, version: version}, func(c *net.UnixConn) {
			send(c, &message{kind: msgConnectReply, number: 5})
			silent(c)
		}), session.ReasonNoListener},
		{"answers about no segment", welcome(message{kind: msgLinkReply, version: version}, func(c *net.UnixConn) {
			send(c, &message{kind: msgSegmentReply})
			silent(c)
		}), session.ReasonNoListener},
		{"refuses for an unknown reason", welcome(message{kind: msgLinkReply, version: version}, func(c *net.UnixConn) {
			var m message
			fds, _ := receive(c, &m)
			closeAll(fds)
			send(c, &message{kind: msgConnectReply, number: m.number, code: 99})
			silent(c)
		}), session.ReasonProtocol},
	} {
		t.Run(tc.name, func(t *testing.T) {
			leaks(t)
			tcp, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer tcp.Close()
			serveRendezvous(t, tcp, tc.serve)
			start := time.Now()
			_, err = dial(tcp.Addr(), Config{Timeout: 100 * time.Millisecond})
			var u *session.Unavailable
			if !errors.As(err, &u) || u.Reason != tc.reason {
				t.Errorf("got %v, want %v", err, tc.reason)
			}
			if d := time.Since(start); d > patience/2 {
				t.Errorf("took %v", d)
			}
		})
	}
}

// A link that ends before it answers may have ended by itself: others are tried, but only
// a few.
func TestDialTriesAnotherLink(t *testing.T) {
	leaks(t)
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer tcp.Close()
	var came atomic.Int32
	serveRendezvous(t, tcp, func(*net.UnixConn) { came.Add(1) }) // and hangs up
	_, err = dial(tcp.Addr(), Config{})
	var u *session.Unavailable
	if !errors.As(err, &u) || u.Reason != session.ReasonNoListener {
		t.Errorf("got %v, want %v", err, session.ReasonNoListener)
	}
	if n := came.Load(); n != linkTries {
		t.Errorf("%d links were tried, want %d", n, linkTries)
	}
}

func TestRendezvousThatIsTaken(t *testing.T) {
	leaks(t)
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer tcp.Close()
	serveRendezvous(t, tcp, func(*net.UnixConn) {})
	_, err = Listen(tcp.(*net.TCPListener), Config{})
	var u *session.Unavailable
	if !errors.As(err, &u) || u.Reason != session.ReasonOwner {
		t.Errorf("got %v", err)
	}
}

// A listener bounds its links, and those from each user so that one user cannot keep the
// others out.
func TestDialingProcessesAreBounded(t *testing.T) {
	right := memfd(t, segmentSize(firstSlots), segmentSeals, 0)
	for name, full := range map[string]map[uint32]int{
		"of one user": {uint32(os.Geteuid()): linksPerUser},
		"of all":      {1 << 30: linksMost},
	} {
		t.Run(name, func(t *testing.T) {
			leaks(t)
			tcp, l := listen(t, "127.0.0.1:0", Config{})
			set := func(users map[uint32]int) {
				l.mu.Lock()
				defer l.mu.Unlock()
				l.users = users
			}
			set(full)
			s := dialRaw(t, l)
			s.send(linkRequest(version, firstSlots), right, doorbellEnd(t))
			var m message
			if fds, err := receive(s.conn, &m); err != nil || len(fds) != 0 || m.kind != msgLinkReply || m.code != codeResources {
				closeAll(fds)
				t.Errorf("answered %+v, %v", m, err)
			}
			if fds, err := receive(s.conn, &m); err == nil {
				closeAll(fds)
				t.Errorf("then %+v, %v", m, err)
			}
			s.conn.Close()

			// Neither silent dialers nor those being declined hold up the rest.
			for range 2 * maxRefusing {
				s := dialRaw(t, l)
				defer s.conn.Close()
			}
			set(make(map[uint32]int))
			servesOthers(t, tcp, l)
		})
	}
}

// Mappings are bounded in bytes and in number, and one that fails is not counted.
func TestMappingsAreBounded(t *testing.T) {
	right := memfd(t, segmentSize(firstSlots), segmentSeals, 0)
	for name, c := range map[string]struct {
		fd   int
		full *atomic.Int64
		most int64
		want error
	}{
		"bytes":     {right, &mapped, mappedMost, unix.ENOMEM},
		"number":    {right, &mappings, mappingsMost, unix.ENOMEM},
		"no memory": {-1, &mapped, mapped.Load(), unix.EBADF},
	} {
		bytes, n := mapped.Load(), mappings.Load()
		more := c.most - c.full.Load()
		c.full.Add(more)
		m, err := newMapping(c.fd, firstSlots)
		c.full.Add(-more)
		if err == nil {
			m.unmap()
		}
		if !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
		if mapped.Load() != bytes || mappings.Load() != n {
			t.Errorf("%s: %d bytes and %d mappings by the books, were %d and %d", name, mapped.Load(), mappings.Load(), bytes, n)
		}
	}
}

// A peer that writes nonsense into the shared memory costs this process the connection,
// never a crash, a hang or a byte outside the ring. What a ring does about it is tested
// there.
func TestPeerThatCorruptsTheSlot(t *testing.T) {
	corrupt := func(c *ring.Control) {
		for i := range unsafe.Sizeof(*c) {
			*(*byte)(unsafe.Add(unsafe.Pointer(c), i)) = 0xff
		}
	}
	t.Run("of what comes", func(t *testing.T) {
		a, b := pair(t, Config{})
		corrupt(&a.Endpoint.(*endpoint).control.ring[0])
		var ev session.Event
		if b.Poll(&ev) || !errors.Is(b.Err(), syscall.ECONNRESET) {
			t.Errorf("the receiver finds %v", b.Err())
		}
		if b.Poll(&ev) || b.Reserve(1, 1) != nil || b.ReserveControl(1) != nil {
			t.Error("the connection goes on")
		}
	})
	t.Run("of what goes", func(t *testing.T) {
		a, b := pair(t, Config{})
		a.send([]byte("a message that was sent before"))
		corrupt(&a.Endpoint.(*endpoint).control.ring[1])
		b.fill(ring.MaxMessage)
		if !errors.Is(b.Err(), syscall.ECONNRESET) {
			t.Errorf("the sender finds %v", b.Err())
		}
		if b.Poll(new(session.Event)) || b.Reserve(1, 1) != nil || b.ReserveControl(1) != nil {
			t.Error("the connection goes on")
		}
	})
}

// The same at random, while both sides work.
func TestRandomCorruptionDoesNoHarm(t *testing.T) {
	leaks(t)
	for seed := range int64(200) {
		a, b, err := connected(Config{})
		if err != nil {
			t.Fatal(err)
		}
		a.Start(newSleeper())
		b.Start(newSleeper())
		r := rand.New(rand.NewSource(seed))
		e := a.(*endpoint)
		var ev session.Event
		for range 300 {
			if n := 1 + r.Intn(session.MaxControl); r.Intn(9) == 0 && a.ReserveControl(n) != nil {
				a.CommitControl(n)
			} else if buf := a.Reserve(1, 1+r.Intn(2000)); buf != nil {
				a.Commit(len(buf))
			}
			if r.Intn(20) == 0 {
				word := r.Intn(controlSize / 8)
				mem := e.link.slots.maps[0].mem[2*bellSize+e.slot.number*controlSize+word*8:]
				if at := uintptr(word * 8); at >= unsafe.Offsetof(e.control.state) && at < unsafe.Offsetof(e.control.cells) {
					continue // states: a close is in order
				}
				mem[r.Intn(8)] ^= byte(1 << r.Intn(8))
			}
			if r.Intn(20) == 0 {
				e.slot.rings[e.side][r.Intn(32<<10)] ^= byte(r.Intn(256))
			}
			for r.Intn(3) > 0 && b.Poll(&ev) {
				switch {
				case ev.Kind == session.Message && len(ev.Msg) > ring.MaxMessage:
					t.Fatalf("seed %d: a message of %d bytes", seed, len(ev.Msg))
				case r.Intn(2) == 0:
					b.Keep()
				default:
					b.Drop()
				}
			}
			for r.Intn(3) > 0 && b.Front() != nil {
				b.Release()
			}
		}
		end(a)
		end(b)
	}
}

// A process that momentarily lacks room or a descriptor for a link's next segment fails
// the dial that needed it, and nothing else.
func TestSegmentThatCannotBeTaken(t *testing.T) {
	leaks(t)
	tcp, l := listen(t, "127.0.0.1:0", Config{})
	var all [][2]session.Endpoint
	defer func() {
		for _, c := range all {
			end(c[0])
			end(c[1])
		}
	}()
	connect := func() error {
		bound := bind(t, "127.0.0.1")
		a, err := Dial(t.Context(), bound, tcp.Addr().(*net.TCPAddr), Config{})
		if err != nil {
			unix.Close(bound)
			return err
		}
		b, _, _, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, [2]session.Endpoint{a, b})
		return nil
	}
	for range firstSlots {
		if err := connect(); err != nil {
			t.Fatal(err)
		}
	}
	// The dialing end can map the next segment, the accepting one cannot.
	most := mappedMost - mapped.Load() - segmentSize(nextSegment(firstSlots))
	mapped.Add(most)
	err := connect()
	mapped.Add(-most)
	why := new(session.Unavailable)
	if !errors.As(err, &why) || why.Reason != session.ReasonResources {
		t.Errorf("the dial: %v, want %v", err, session.ReasonResources)
	}
	if err := connect(); err != nil {
		t.Errorf("the next dial: %v", err)
	}
	if len(all) != firstSlots+1 {
		t.Fatalf("%d connections", len(all))
	}
	for i, c := range all {
		if c[0].Reserve(8, 8) == nil {
			t.Fatalf("connection %d takes nothing: %v", i, c[0].Err())
		}
		c[0].Commit(8)
		var ev session.Event
		if !c[1].Poll(&ev) || len(ev.Msg) != 8 {
			t.Fatalf("connection %d brings nothing: %v", i, c[1].Err())
		}
		c[1].Drop()
	}
}

func TestSegmentWhoseDescriptorIsLost(t *testing.T) {
	leaks(t)
	tcp, l := listen(t, "127.0.0.1:0", Config{})
	s := dialRaw(t, l)
	s.handshake()
	right := memfd(t, segmentSize(firstSlots), segmentSeals, 0)
	for _, c := range []struct {
		fds  []int // more than a message has: the kernel closes the rest, as where there is no descriptor left
		code uint8
	}{{[]int{right, right, right}, codeResources}, {[]int{right}, codeOK}} {
		s.send((&message{kind: msgSegment, number: firstSlots}).encode(), c.fds...)
		var m message
		fds, err := receive(s.conn, &m)
		closeAll(fds)
		if err != nil || m.kind != msgSegmentReply || m.code != c.code {
			t.Fatalf("%d descriptors: %+v, %v, want code %d", len(c.fds), m, err, c.code)
		}
	}
	servesOthers(t, tcp, l)
}

// If a link ends while a dial offers it a segment, the segment is unmapped only once, and
// the dial learns that another link may do.
func TestLinkThatEndsDuringAnOffer(t *testing.T) {
	leaks(t)
	tcp, l := listen(t, "127.0.0.1:0", Config{})
	for i := range 100 {
		a, b := meet(t, tcp, l)
		near, far := a.(*endpoint).link, b.(*endpoint).link
		near.slots.mu.Lock()
		near.slots.free = nil
		near.slots.mu.Unlock()
		failed := make(chan error, 1)
		go func() {
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			e, err := near.connect(ctx, -1, netip.AddrPort{})
			if err == nil {
				end(e)
			}
			failed <- err
		}()
		abort(a)
		abort(b)
		for range i * 20 {
			runtime.Gosched()
		}
		far.control.close()
		// The answer came in time, and refused a dial without an address; or it did not.
		if err := <-failed; err == nil || !errors.Is(err, errLinkGone) && err.Error() != codeError(codeAddress).Error() {
			t.Errorf("the dial: %v", err)
		}
		near.closeUnused()
	}
}

// A dial goes on when one with a shorter timeout had asked for the link first and failed.
func TestPatientDialOutlastsAnImpatientOne(t *testing.T) {
	leaks(t)
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer tcp.Close()
	asked := make(chan struct{}, 16)
	serveRendezvous(t, tcp, func(c *net.UnixConn) {
		asked <- struct{}{}
		io.Copy(io.Discard, c)
	})
	const little, much = 50 * time.Millisecond, 500 * time.Millisecond
	impatient := make(chan error, 1)
	go func() {
		_, err := dial(tcp.Addr(), Config{Timeout: little})
		impatient <- err
	}()
	<-asked
	began := time.Now()
	_, err = dial(tcp.Addr(), Config{Timeout: much})
	if took := time.Since(began); took < much*9/10 {
		t.Errorf("%v after %v, with %v of time", err, took, much)
	}
	for _, err := range []error{err, <-impatient} {
		var u *session.Unavailable
		if !errors.As(err, &u) || u.Reason != session.ReasonTimeout {
			t.Errorf("%v, want %v", err, session.ReasonTimeout)
		}
	}
}
