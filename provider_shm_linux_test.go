package san

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/provider/shm"
)

// With default settings, a connection within this host moves to shared memory once it has been used
// enough.
func TestSharedMemoryIsTheDefault(t *testing.T) {
	l, err := Listen("tcp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c := mustDial(t, new(Dialer), l.Addr().String())
	s := mustAccept(t, l)
	go io.Copy(s, struct{ io.Reader }{s})
	wantFallback(t, c, ReasonUnused)
	for turns := 0; InfoOf(c).Provider == providerTCP; turns++ {
		if turns > 1_000_000 {
			t.Fatalf("%d turns, and %+v", turns, InfoOf(c))
		}
		send(t, c, c, "there and back")
	}
	wantMoved(t, c, shm.Name)
	wantMoved(t, s, shm.Name)
}

func TestPlainServerOnThisHostIsAFallback(t *testing.T) {
	wantStays(t, mustDial(t, atOnce(), acceptsPlainly(t).Addr().String()), ReasonNoListener)
}

// A name has two addresses. TCP is refused at the first one; the second one is tried, and the connection
// to it moves.
func TestFirstOfTwoAddressesIsDead(t *testing.T) {
	for _, policy := range []Policy{Prefer, Require} {
		l := mustListen(t, &ListenConfig{Policy: policy}, "tcp", "127.0.0.1:0")
		d := atOnce()
		d.Policy = policy
		d.NetDialer.Resolver = answering(t, map[string][]string{"two.test.": {"127.0.0.2", "127.0.0.1"}})
		c := mustDial(t, d, net.JoinHostPort("two.test", portOf(l.Addr().String())))
		mustAccept(t, l)
		wantMoved(t, c, shm.Name)
	}
}

// While the accepting process has no free descriptors, its connections do not move, and the reason tells
// that. When it has some again, they do.
func TestListenerOutOfDescriptors(t *testing.T) {
	l := shmLanes[1]
	p := startRole(t, "listen", l, "")
	addr := p.line(t)
	free := func(from int) int { // returns the next descriptor that the process does not use
		for {
			if _, err := os.Lstat(fmt.Sprintf("/proc/%d/fd/%d", p.Process.Pid, from)); err != nil {
				return from
			}
			from++
		}
	}
	c := mustDial(t, l.dialer(), addr)
	if got := p.line(t); got != "accepted" { // the process has accepted the connection, not only its kernel; so the move can find it
		t.Fatal(got)
	}
	var was unix.Rlimit
	none := unix.Rlimit{Cur: uint64(free(free(0) + 1))} // room for the link's socket, but for no other descriptor
	if err := unix.Prlimit(p.Process.Pid, unix.RLIMIT_NOFILE, nil, &was); err != nil {
		t.Fatal(err)
	}
	none.Max = was.Max
	if err := unix.Prlimit(p.Process.Pid, unix.RLIMIT_NOFILE, &none, nil); err != nil {
		t.Fatal(err)
	}
	use := func() {
		if _, err := c.Write([]byte("a use")); err != nil {
			t.Fatal(err)
		}
	}
	useUntil(t, c, use, "it lacks descriptors", func() bool { return InfoOf(c).Fallback == ReasonResources })
	wantTried(t, c, ReasonResources)
	if err := unix.Prlimit(p.Process.Pid, unix.RLIMIT_NOFILE, &was, nil); err != nil {
		t.Fatal(err)
	}
	useUntil(t, c, use, "it moves", func() bool { return InfoOf(c).Provider == shm.Name })
}

// If nobody listens, the error is TCP's with each policy, and the dial takes no more than one socket.
func TestWhereNobodyListensTCPIsTried(t *testing.T) {
	addr := freePort(t)
	for _, policy := range []Policy{Prefer, Require, Never} {
		sockets := 0
		d := &Dialer{Policy: policy, NetDialer: net.Dialer{Control: func(string, string, syscall.RawConn) error {
			sockets++
			return nil
		}}}
		_, err := d.Dial("tcp", addr)
		wantOpError(t, err, "dial", syscall.ECONNREFUSED)
		if sockets != 1 {
			t.Errorf("%v: %d sockets", policy, sockets)
		}
		if why := (*Unavailable)(nil); errors.As(err, &why) {
			t.Errorf("%v: %v, which is not net's", policy, err)
		}
	}
}
