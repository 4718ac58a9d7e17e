package shm

import (
	"context"
	"errors"
	"os"
	"runtime"
	"slices"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/session"
)

// controlPair returns two control sockets that are connected.
func controlPair(t *testing.T) (a, b controlSocket) {
	t.Helper()
	conns, err := unixPair()
	if err != nil {
		t.Fatal(err)
	}
	var ends [2]controlSocket
	for i, c := range conns {
		ends[i].UnixConn = c
		if ends[i].raw, err = c.SyscallConn(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
	}
	return ends[0], ends[1]
}

// If too many descriptors of this process's user are in transit, which other processes may have sent,
// post waits. It must not end the link.
func TestPostWithTooManyDescriptorsOnTheirWay(t *testing.T) {
	a, b := controlPair(t)
	other := descriptorsOnTheirWay(t)
	defer fewDescriptorsOnTheirWay(t)()
	m := message{kind: msgSegmentReply}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := a.post(ctx, &m, other[0])
	if why := new(session.Unavailable); !errors.Is(err, context.Canceled) || !errors.As(err, &why) || why.Reason != session.ReasonResources {
		t.Errorf("it has not waited, or blames the peer: %v", err)
	}
	unix.Close(other[1]) // closes the descriptors in transit
	if err := a.post(t.Context(), &m, other[0]); err != nil {
		t.Fatal(err)
	}
	fds, err := receive(b.UnixConn, &m)
	closeAll(fds)
	if err != nil || len(fds) != 1 {
		t.Errorf("%d descriptors, %v", len(fds), err)
	}
}

// fewDescriptorsOnTheirWay makes the kernel bound how many descriptors this goroutine may have in
// transit, as it does for unprivileged users, to a number that is soon reached.
func fewDescriptorsOnTheirWay(t *testing.T) (undo func()) {
	t.Helper()
	runtime.LockOSThread()
	var was unix.Rlimit
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var caps [2]unix.CapUserData
	err := errors.Join(unix.Getrlimit(unix.RLIMIT_NOFILE, &was), unix.Capget(&head, &caps[0]))
	had := caps
	caps[0].Effective &^= 1<<unix.CAP_SYS_ADMIN | 1<<unix.CAP_SYS_RESOURCE
	if err == nil {
		err = errors.Join(unix.Capset(&head, &caps[0]),
			unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: min(was.Cur, mostOnTheirWay), Max: was.Max}))
	}
	if err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := errors.Join(unix.Capset(&head, &had[0]), unix.Setrlimit(unix.RLIMIT_NOFILE, &was)); err != nil {
			t.Error(err)
		}
		runtime.UnlockOSThread()
	}
}

// descriptorsOnTheirWay sends far more descriptors than fewDescriptorsOnTheirWay allows, before that
// sets the bound, because the number that other processes of this user have in transit may change. They
// stay in transit until the second socket is closed.
func descriptorsOnTheirWay(t *testing.T) (other [2]int) {
	t.Helper()
	other, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(other[0]) })
	const most = 253 // the most in one message: SCM_MAX_FD
	many := unix.UnixRights(slices.Repeat([]int{other[0]}, most)...)
	for range 2 * mostOnTheirWay / most {
		if err := unix.Sendmsg(other[0], []byte{1}, many, nil, unix.MSG_DONTWAIT); err != nil {
			t.Fatal(err)
		}
	}
	return other
}

// mostOnTheirWay is the number of descriptors in transit from which no more can be sent.
const mostOnTheirWay = 256

// If the reply's descriptors cannot be sent to a dialing process, it finds that there are no resources,
// not that nobody listens.
func TestReplyWithTooManyDescriptorsOnTheirWay(t *testing.T) {
	a, b := controlPair(t)
	s := rawPeer{t, a.UnixConn}
	s.send(linkRequest(version, firstSlots), halfToPass(t), doorbellEnd(t))
	defer unix.Close(descriptorsOnTheirWay(t)[1])
	defer fewDescriptorsOnTheirWay(t)()
	if _, err := acceptLink(b.UnixConn, Config{}.withDefaults(), nil); !errors.Is(err, unix.ETOOMANYREFS) {
		t.Errorf("the reply was sent: %v", err)
	}
	var reply message
	fds, err := receive(s.conn, &reply)
	closeAll(fds)
	if err != nil || reply.kind != msgLinkReply || reply.code != codeResources {
		t.Errorf("%+v, %v", reply, err)
	}
}

// A post to a peer that does not read waits until the peer reads, the link ends, or the caller's context
// ends.
func TestPostWaitsForThePeer(t *testing.T) {
	a, b := controlPair(t)
	givesUp, cancel := context.WithCancel(t.Context())
	cancel() // matters only if post has to wait
	full := 0
	var err error
	for ; err == nil; full++ {
		err = a.post(givesUp, &message{kind: msgConnect, number: uint32(full)})
	}
	full-- // the last message was not sent
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("after %d messages: %v", full, err)
	}
	gone := make(chan struct{})
	close(gone)
	dead := a
	dead.gone = gone
	if err := dead.post(t.Context(), &message{}); !errors.Is(err, errPeerGone) {
		t.Errorf("the link has ended: %v", err)
	}
	posted := make(chan error, 1)
	go func() { posted <- a.post(t.Context(), &message{kind: msgConnect, number: uint32(full)}) }()
	b.SetDeadline(time.Now().Add(patience))
	for n := range full + 1 {
		var m message
		if _, err := receive(b.UnixConn, &m); err != nil || m.kind != msgConnect || m.number != uint32(n) {
			t.Fatalf("message %d: %+v, %v", n, m, err)
		}
	}
	if err := <-posted; err != nil {
		t.Error(err)
	}
	b.Close()
	if err := a.post(t.Context(), &message{}); !isGone(err) {
		t.Errorf("the peer is gone: %v", err)
	}
}

// countingConn counts calls of RawConn.Control.
type countingConn struct {
	syscall.RawConn
	calls int
}

func (c *countingConn) Control(f func(fd uintptr)) error {
	c.calls++
	return c.RawConn.Control(f)
}

// If a peer never reads, the attempts to send to it become rarer.
func TestPostToAPeerThatNeverReads(t *testing.T) { synctest.Test(t, testPostToAPeerThatNeverReads) }

func testPostToAPeerThatNeverReads(t *testing.T) {
	a, _ := controlPair(t)
	for {
		full := errors.New("full")
		a.raw.Control(func(fd uintptr) { full = unix.Send(int(fd), make([]byte, messageSize), unix.MSG_DONTWAIT) })
		if full != nil {
			break
		}
	}
	counting := &countingConn{RawConn: a.raw}
	a.raw = counting
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	if err := a.post(ctx, &message{}); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	if counting.calls != 9 { // the pauses before the next attempt amount to 511 ms
		t.Errorf("it was sent %d times", counting.calls)
	}
}

// Of a message with more descriptors than the protocol allows, only the allowed number is received; the
// others stay in the queue. If the kernel dropped them, it would close them in this process, which may
// take long.
func TestMessageWithTooManyDescriptors(t *testing.T) {
	a, b := controlPair(t)
	fds := make([]int, mostPassed)
	lingers := lingering(t)
	for i := range fds {
		fds[i] = lingers
	}
	if err := send(a.UnixConn, &message{kind: msgSegment}, fds...); err != nil {
		t.Fatal(err)
	}
	unix.Close(lingers) // not the last reference, as it is in transit
	b.SetDeadline(time.Now().Add(patience))
	began := time.Now()
	var m message
	got, err := receive(b.UnixConn, &m)
	if len(got) != mostFDs || !errors.Is(err, errTooMany) {
		t.Errorf("%d descriptors, %v", len(got), err)
	}
	closeAll(got)
	if d := time.Since(began); d > patience/2 {
		t.Errorf("it took %v", d)
	}
}

// Each message is received with the user who has sent it.
func TestMessagesHaveTheirSendersUser(t *testing.T) {
	a, b := controlPair(t)
	if err := send(a.UnixConn, &message{kind: msgConnect}); err != nil {
		t.Fatal(err)
	}
	var m message
	if fds, err := receive(b.UnixConn, &m); err != nil || len(fds) != 0 || m.user != uint32(os.Geteuid()) {
		t.Errorf("user %d, %d descriptors, %v", m.user, len(fds), err)
	}
}
