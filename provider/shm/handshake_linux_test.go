package shm

import (
	"errors"
	"io"
	"math/rand"
	"net"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/session"
)

func TestGarbageEndsItsSenderOnly(t *testing.T) {
	leaks(t)
	l := listen(t, Config{})
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
		hello bool // sent first
		bytes []byte
		fds   []int
	}{
		{"noise", false, noise, nil},
		{"noise with descriptors", false, noise, pipe[:]},
		{"HTTP", false, []byte("GET / HTTP/1.1\r\n\r\n"), nil},
		{"a long packet", false, make([]byte, 100000), nil},
		{"nothing", false, nil, nil},
		{"link without a segment", false, linkRequest(version, firstSlots), nil},
		{"link without a doorbell", false, linkRequest(version, firstSlots), []int{memfd(t, halfSize(firstSlots), halfSeals, 0)}},
		{"link with a pipe for a doorbell", false, linkRequest(version, firstSlots), []int{memfd(t, halfSize(firstSlots), halfSeals, 0), pipe[1]}},
		{"connect first", false, (&message{kind: msgConnect}).encode(), nil},
		{"link again", true, linkRequest(version, firstSlots), pipe[:1]},
		{"noise later", true, noise, pipe[:]},
		{"a short message", true, (&message{kind: msgConnect}).encode()[:messageSize-1], nil},
		{"a slot that is not there", true, (&message{kind: msgConnect, number: firstSlots}).encode(), nil},
		{"the last slot of all", true, (&message{kind: msgConnect, number: 1<<32 - 1}).encode(), nil},
		{"an acceptor's message", true, (&message{kind: msgRefuse}).encode(), nil},
		{"an unknown message", true, (&message{kind: 200}).encode(), nil},
		{"a connect with a descriptor", true, connectTo(0), pipe[:1]},
		{"a segment with three descriptors", true, (&message{kind: msgSegment, number: firstSlots}).encode(), []int{pipe[0], pipe[1], pipe[0]}},
		{"a segment without one", true, (&message{kind: msgSegment, number: firstSlots}).encode(), nil},
		{"more descriptors than a message has", true, (&message{kind: msgConnect, number: firstSlots}).encode(), []int{pipe[0], pipe[1], pipe[0], pipe[1]}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := dialRaw(t, l)
			if tc.hello {
				s.handshake()
			}
			s.send(tc.bytes, tc.fds...)
			s.awaitHangUp()
			servesOthers(t, l)
		})
	}
}

func TestAnotherVersionIsToldSo(t *testing.T) {
	leaks(t)
	l := listen(t, Config{})
	s := dialRaw(t, l)
	fd := memfd(t, halfSize(firstSlots), halfSeals, 0)
	s.send(linkRequest(version+1, firstSlots), fd, doorbellEnd(t))
	if last := s.awaitHangUp(); last.kind != msgLinkReply || last.code != codeVersion || last.version != version {
		t.Errorf("answered %+v", last)
	}
}

// A dialer that connects and sends nothing is soon disconnected.
func TestMuteDialerIsHungUpOn(t *testing.T) {
	leaks(t)
	l := listen(t, Config{})
	start := time.Now()
	dialRaw(t, l).awaitHangUp()
	if d := time.Since(start); d > patience/2 {
		t.Errorf("it took %v", d)
	}
	servesOthers(t, l)
}

// A link that a dialing process holds without connections is ended after a time, and its resources are
// released.
func TestIdleLinksAreEnded(t *testing.T) {
	setIdleTicks(t, 50) // a second: the link that gets a connection below is idle at first
	leaks(t)
	l := listen(t, Config{})
	var idle []*rawPeer
	for range 10 {
		s := dialRaw(t, l)
		s.handshake()
		idle = append(idle, s)
	}
	busy := dialRaw(t, l)
	busy.send(linkRequest(version, firstSlots), halfToPass(t), doorbellEnd(t))
	b := busy.connect(l, 0) // at once, as the link is idle until then
	for _, s := range idle {
		s.awaitHangUp()
	}
	if b.Err() != nil {
		t.Errorf("a link with a connection ended: %v", b.Err())
	}
	end(b)
	busy.awaitHangUp() // although the dialing end has not retired
}

// A process that lacks a descriptor for a link answers with that reason. If it hung up, that would mean
// that nobody listens.
func TestLinkForWhichThereIsNoDescriptor(t *testing.T) {
	leaks(t)
	half, door := halfToPass(t), doorbellEnd(t)
	was := openEventfd
	t.Cleanup(func() { openEventfd = was })
	openEventfd = func() (at, pass int, err error) { return -1, -1, unix.EMFILE }
	s := dialRaw(t, listen(t, Config{}))
	s.send(linkRequest(version, firstSlots), half, door)
	if m := s.awaitHangUp(); m.kind != msgLinkReply || m.code != codeResources {
		t.Errorf("the answer was %+v", m)
	}
}

// The same for a process that is not permitted one of the steps of making a link, whichever it is.
func TestLinkThatMayNotBeMade(t *testing.T) {
	leaks(t)
	at, door, err := newEventfd()
	if err != nil {
		t.Fatal(err)
	}
	defer closeAll([]int{at, door})
	half := halfToPass(t)
	for name, call := range map[string]uint32{"memfd_create": unix.SYS_MEMFD_CREATE, "fstatfs": unix.SYS_FSTATFS, "statx": unix.SYS_STATX} {
		conns, err := unixPair()
		if err != nil {
			t.Fatal(err)
		}
		failed := make(chan error)
		go func() {
			runtime.LockOSThread() // never unlocked: the filter ends with the thread
			err := failAtThread(call, unix.EPERM)
			if err == nil {
				_, err = acceptLink(conns[1], Config{}.withDefaults(), nil)
			}
			failed <- err
		}()
		s := &rawPeer{t, conns[0]}
		s.send(linkRequest(version, firstSlots), half, door)
		if m := s.awaitHangUp(); m.kind != msgLinkReply || m.code != codeResources {
			t.Errorf("%s: the answer was %+v", name, m)
		}
		if err := <-failed; !errors.Is(err, unix.EPERM) {
			t.Errorf("%s: %v", name, err)
		}
		conns[0].Close()
	}
}

func TestSlowDialersHoldUpNobody(t *testing.T) {
	was := handshakeTimeout
	t.Cleanup(func() { handshakeTimeout = was })
	handshakeTimeout = patience // whoever waited for one of them would do so for too long
	leaks(t)
	l := listen(t, Config{})
	for range 40 {
		dialRaw(t, l)
	}
	servesOthers(t, l)
	start := time.Now()
	l.Close()
	if d := time.Since(start); d > patience/2 {
		t.Errorf("Close waited for them: %v", d)
	}
}

// answerLink answers a dialer's first message with m, and then calls then.
func answerLink(m message, then func(*net.UnixConn), fds ...int) func(*net.UnixConn) {
	return func(c *net.UnixConn) {
		var h message
		got, _ := receive(c, &h)
		closeAll(got)
		send(c, &m, fds...)
		if then != nil {
			then(c)
		}
	}
}

func silent(c *net.UnixConn) { io.Copy(io.Discard, c) }

// dialBad dials a listener that serves connections by serve, and expects the reason.
func dialBad(t *testing.T, serve func(*net.UnixConn), want session.Reason) {
	t.Helper()
	leaks(t)
	at := serveName(t, serve)
	var cfg Config
	if want == session.ReasonTimeout {
		cfg.timeout = 500 * time.Millisecond
	}
	start := time.Now()
	_, err := dial(at, cfg)
	wantReason(t, err, want)
	if d := time.Since(start); d > patience/2 {
		t.Errorf("took %v", d)
	}
}

func TestListenersThatDoNotWelcome(t *testing.T) {
	for _, tc := range []struct {
		name   string
		serve  func(*net.UnixConn)
		reason session.Reason
	}{
		{"hang up", func(*net.UnixConn) {}, session.ReasonNoListener},
		{"never answer", silent, session.ReasonTimeout},
		{"garbage", func(c *net.UnixConn) { c.Write(make([]byte, 99)); silent(c) }, session.ReasonProtocol},
		{"another message", answerLink(message{kind: msgRefuse}, silent), session.ReasonProtocol},
		{"another version", answerLink(message{kind: msgLinkReply, version: version, code: codeVersion}, nil), session.ReasonVersion},
		{"an unknown code", answerLink(message{kind: msgLinkReply, version: version, code: 77}, nil), session.ReasonProtocol},
	} {
		t.Run(tc.name, func(t *testing.T) { dialBad(t, tc.serve, tc.reason) })
	}
}

func TestListenersThatWelcomeAndDoNotKeepTheProtocol(t *testing.T) {
	half, door := halfToPass(t), doorbellEnd(t)
	for _, tc := range []struct {
		name   string
		then   func(*net.UnixConn)
		reason session.Reason
	}{
		{"no more", silent, session.ReasonTimeout},
		{"answers to nothing", func(c *net.UnixConn) {
			send(c, &message{kind: msgRefuse, number: 5, code: codeResources})
			silent(c)
		}, session.ReasonNoListener},
		{"answers about no segment", func(c *net.UnixConn) {
			send(c, &message{kind: msgSegmentReply})
			silent(c)
		}, session.ReasonNoListener},
		{"asks for a connection", func(c *net.UnixConn) {
			send(c, &message{kind: msgConnect, number: 1})
			silent(c)
		}, session.ReasonNoListener},
		{"adds a segment", func(c *net.UnixConn) {
			send(c, &message{kind: msgSegment, number: firstSlots}, half)
			silent(c)
		}, session.ReasonNoListener},
		{"refuses for an unknown reason", func(c *net.UnixConn) {
			var m message
			fds, _ := receive(c, &m)
			closeAll(fds)
			send(c, &message{kind: msgRefuse, number: m.number, code: 99})
			silent(c)
		}, session.ReasonProtocol},
	} {
		t.Run(tc.name, func(t *testing.T) {
			welcome := message{kind: msgLinkReply, version: version}
			dialBad(t, answerLink(welcome, tc.then, half, door), tc.reason)
		})
	}
}
