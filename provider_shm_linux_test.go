package san

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/provider/shm"
	"github.com/sanconn/san/sanconn"
	"golang.org/x/sys/unix"
)

// With nothing configured, a connection within this host uses shared memory.
func TestSharedMemoryIsTheDefault(t *testing.T) {
	l, err := Listen("tcp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	d := new(Dialer)
	if inGuest != "" {
		d.Options.AttemptTimeout = testTimeout
	}
	c := mustDial(t, d, l.Addr().String())
	wantProvider(t, c, shm.Name)
	wantProvider(t, mustAccept(t, l), shm.Name)
}

func TestPlainServerOnThisHostIsAFallback(t *testing.T) {
	c := mustDial(t, &Dialer{}, plainListen(t, "127.0.0.1:0").Addr().String())
	wantFallback(t, c, ReasonNoListener)
}

// A name whose first address is dead: TCP is refused there, and the next one is
// tried, over the SAN.
func TestFirstOfTwoAddressesIsDead(t *testing.T) {
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	for _, policy := range []Policy{Prefer, Require} {
		d := &Dialer{Policy: policy}
		d.NetDialer.Resolver = answering(t, map[string][]string{"two.test.": {"127.0.0.2", "127.0.0.1"}})
		c := mustDial(t, d, net.JoinHostPort("two.test", portOf(l.Addr().String())))
		wantProvider(t, c, shm.Name)
	}
}

// Somebody else has the rendezvous of a TCP listener. That is no listener of ours, so the
// connection falls back. A listener that finds its place taken reports it.
func TestSquatterOnTheRendezvous(t *testing.T) {
	var p shmProvider
	tcp := plainListen(t, "127.0.0.1:0")
	first, err := p.listen(tcp, settle(sanconn.Options{}, RDMA{}, Prefer, environment{}, 1))
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()
	if second, err := p.listen(tcp, settle(sanconn.Options{}, RDMA{}, Prefer, environment{}, 1)); err == nil {
		second.Close()
		t.Error("two have the same rendezvous")
	} else if reasonOf(err) != ReasonOwner {
		t.Errorf("reason %v: %v", reasonOf(err), err)
	}
}

// While the listener's process is stopped, the kernel still takes TCP connections for it, so
// the dial ends there after one delay.
func TestStoppedListenerCostsOneDelay(t *testing.T) {
	l := systemLanes[0]
	if l.host != "" {
		return // a queue pair's kernel half goes on as TCP's does
	}
	p := startRole(t, "listen", l, "")
	addr := p.line(t)
	wantProvider(t, mustDial(t, l.dialer(), addr), shm.Name)
	if err := p.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	var status syscall.WaitStatus
	if _, err := syscall.Wait4(p.Process.Pid, &status, syscall.WUNTRACED, nil); err != nil || !status.Stopped() {
		t.Fatalf("not stopped: %v, %v", status, err)
	}
	resetBackoff()
	d := &Dialer{}
	d.Options.AttemptTimeout = minSilence
	wantFallback(t, mustDial(t, d, addr), ReasonTimeout)
	wantFallback(t, mustDial(t, d, addr), ReasonRemembered)
	resetBackoff()
	local, err := net.ResolveTCPAddr("tcp", freePort(t))
	if err != nil {
		t.Fatal(err)
	}
	d.NetDialer.LocalAddr = local // which the listener has in its queue, with the socket
	wantFallback(t, mustDial(t, d, addr), ReasonTimeout)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err = l.dialer().DialContext(ctx, "tcp", addr)
	wantOpError(t, err, "dial", context.DeadlineExceeded)

	if err := p.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	resetBackoff()
	wantProvider(t, mustDial(t, l.dialer(), addr), shm.Name)
}

// A listener without descriptors reports that, and not that there is no listener. It goes on
// when it has some again.
func TestListenerOutOfDescriptors(t *testing.T) {
	l := systemLanes[0]
	if l.host != "" {
		return // the guest's device has its own: provider/verbs
	}
	p := startRole(t, "listen", l, "")
	addr := p.line(t)
	free := func(from int) int { // the next that the process does not use
		for {
			if _, err := os.Lstat(fmt.Sprintf("/proc/%d/fd/%d", p.Process.Pid, from)); err != nil {
				return from
			}
			from++
		}
	}
	var was unix.Rlimit
	none := unix.Rlimit{Cur: uint64(free(free(0) + 1))} // room for the link's socket, and nothing else
	if err := unix.Prlimit(p.Process.Pid, unix.RLIMIT_NOFILE, nil, &was); err != nil {
		t.Fatal(err)
	}
	none.Max = was.Max
	if err := unix.Prlimit(p.Process.Pid, unix.RLIMIT_NOFILE, &none, nil); err != nil {
		t.Fatal(err)
	}
	resetBackoff()
	if _, err := l.dialer().Dial("tcp", addr); reasonOf(err) != ReasonResources {
		t.Errorf("a listener without descriptors: %v", err)
	}
	if err := unix.Prlimit(p.Process.Pid, unix.RLIMIT_NOFILE, &was, nil); err != nil {
		t.Fatal(err)
	}
	wantProvider(t, mustDial(t, l.dialer(), addr), shm.Name)
}

// An address on which no socket listens may still be served: netfilter can redirect it. So
// only TCP's own attempt can result in ECONNREFUSED.
func TestWhereNobodyListensTCPIsTried(t *testing.T) {
	addr := freePort(t)
	sockets := 0
	d := &Dialer{NetDialer: net.Dialer{Control: func(string, string, syscall.RawConn) error {
		sockets++
		return nil
	}}}
	_, err := d.Dial("tcp", addr)
	wantOpError(t, err, "dial", syscall.ECONNREFUSED)
	if sockets != 2 {
		t.Errorf("%d sockets, want the one that shm hands over and TCP's", sockets)
	}
	d.Policy = Require
	_, err = d.Dial("tcp", addr)
	wantOpError(t, err, "dial", syscall.ECONNREFUSED)
	if why := (*Unavailable)(nil); !errors.As(err, &why) || why.Reason != ReasonNoListener {
		t.Errorf("with Require: %v", err)
	}
}
