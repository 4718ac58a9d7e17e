package san

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http/httptrace"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/internal/moving"
	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/sanconn"
)

// atOnce returns a dialer whose connections move as soon as they are accepted. An attempt may take as
// long as a test, because a second attempt comes only after more use, which most tests do not make.
func atOnce() *Dialer {
	d := unhurried()
	d.Options.MoveAtOnce = true
	return d
}

// unhurried returns a dialer whose attempts to move do not time out when a machine is stalled for longer
// than the default timeout.
func unhurried() *Dialer { return &Dialer{Options: sanconn.Options{AttemptTimeout: testTimeout}} }

// Each error that a provider may return for a move leads to its reason. The connection works in each
// case.
func TestDialMoveThatFails(t *testing.T) {
	for _, c := range []struct {
		name   string
		answer error
		reason Reason
	}{
		{"no SAN listener", &Unavailable{Reason: ReasonNoListener}, ReasonNoListener},
		{"another version", &Unavailable{Reason: ReasonVersion}, ReasonVersion},
		{"another owner", fmt.Errorf("shm: %w", &Unavailable{Reason: ReasonOwner}), ReasonOwner},
		{"time-out", os.NewSyscallError("connect", syscall.ETIMEDOUT), ReasonTimeout},
		{"no route over the SAN", syscall.ENETUNREACH, ReasonUnreachable},
		{"not permitted", os.NewSyscallError("socket", syscall.EACCES), ReasonPermission},
		{"out of descriptors", os.NewSyscallError("socket", syscall.EMFILE), ReasonResources},
		{"out of memory", syscall.ENOMEM, ReasonResources},
		{"nonsense", errors.New("magic 0x1234"), ReasonProtocol},
		{"closed", net.ErrClosed, ReasonStays},
		{"closed by the peer", fmt.Errorf("shm: the peer closed the connection: %w", syscall.EPIPE), ReasonStays},
		{"refused", os.NewSyscallError("connect", syscall.ECONNREFUSED), ReasonUnreachable},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := useFake(t)
			f.fail = func(context.Context) error { return c.answer }
			l := plainListen(t, "127.0.0.1:0")

			before := Stats()
			d := atOnce()
			d.Options.AttemptTimeout = time.Second // a timeout would be followed by another attempt
			conn := mustDial(t, d, l.Addr().String())
			wantStays(t, conn, c.reason)
			send(t, conn, mustAccept(t, l), "by TCP")
			after := Stats()
			if n := after.Fallbacks[c.reason] - before.Fallbacks[c.reason]; n != 1 {
				t.Errorf("counted %d times", n)
			}
			if n := after.Dialed["tcp"] - before.Dialed["tcp"]; n != 1 {
				t.Errorf("%d TCP connections counted", n)
			}

			d.Policy = Require
			_, err := d.Dial("tcp", l.Addr().String())
			oe := wantOpError(t, err, "dial", err)
			if oe.Addr == nil || oe.Addr.String() != l.Addr().String() {
				t.Errorf("the error names %v, want %s", oe.Addr, l.Addr())
			}
			if why := (*Unavailable)(nil); !errors.As(err, &why) || why.Reason != c.reason {
				t.Errorf("with Require: %v", err)
			} else if !strings.Contains(err.Error(), "no SAN connection") {
				t.Errorf("with Require the error is %v", err)
			}
			if n := Stats().Fallbacks[c.reason] - after.Fallbacks[c.reason]; n != 1 {
				t.Errorf("with Require, counted %d times", n)
			}
			server := mustAccept(t, l)
			server.SetDeadline(time.Now().Add(testTimeout))
			if _, err := server.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) { // no byte comes before the reset
				t.Errorf("with Require the other end finds %v", err)
			}
		})
	}
}

// A move that failed is tried again, each time after four times as much use; a later attempt may
// succeed.
func TestDialMoveIsTriedAgain(t *testing.T) {
	f := useFake(t)
	tried := make(chan struct{})
	goOn := make(chan error)
	f.fail = func(context.Context) error {
		tried <- struct{}{}
		return <-goOn
	}
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	c := mustDial(t, new(Dialer), l.Addr().String())
	s := mustAccept(t, l)
	go io.Copy(io.Discard, struct{ io.Reader }{s})
	wantFallback(t, c, ReasonUnused)
	used := uint64(0)
	write := func(until uint64) (moves bool) {
		t.Helper()
		for ; used < until; used += 32 << 10 {
			select {
			case <-tried:
				return true
			default:
			}
			c.SetDeadline(time.Now().Add(testTimeout))
			if _, err := c.Write(make([]byte, 32<<10)); err != nil {
				t.Fatal(err)
			}
		}
		return false
	}
	const tries = 5 // a few failures must not end the attempts
	from := uint64(0)
	for n, distance := 0, uint64(moving.FirstUse); n < tries; n, distance = n+1, moving.MoreUse*distance {
		if write(from + distance) {
			t.Fatalf("try %d comes when %d bytes have been used, %d behind the last", n, used, used-from)
		}
		<-tried // the last Write has to start the attempt; a program would otherwise wait for it
		from = used
		if n == tries-1 {
			goOn <- nil
			wantMoved(t, c, fakeName)
			wantMoved(t, s, fakeName)
			break
		}
		goOn <- &Unavailable{Reason: ReasonResources}
		wantTried(t, c, ReasonResources)
	}
	if info := InfoOf(c); info.Fallback != ReasonNone || info.Cause != nil || info.TCPBytes != used {
		t.Errorf("at last: %+v, want %d bytes by TCP", info, used)
	}
}

// wantTried is wantStays for a connection that would be tried again after more use; that is set up when
// it returns.
func wantTried(t testing.TB, c net.Conn, why Reason) {
	t.Helper()
	wantStays(t, c, why)
	waitFor(t, "the next try to be set", func() bool { return !isTrying() })
}

// useUntil uses a connection until a condition holds. The use matters because an attempt that has
// failed, as under load, is repeated after more use.
func useUntil(t testing.TB, c net.Conn, use func(), what string, ok func() bool) {
	t.Helper()
	waitFor(t, what, func() bool {
		if !ok() && !isMoving(c) {
			newconn.HandleOf(c).CallUse(0)
			use()
		}
		return ok()
	})
}

// wantMovedByUse uses a connection, whose bytes the other end reads, until it has moved.
func wantMovedByUse(t testing.TB, c, to net.Conn, provider string) {
	t.Helper()
	useUntil(t, c, func() { send(t, c, to, "a use") }, "it moves", func() bool { return InfoOf(c).Provider == provider })
}

// wantStaysByUse uses a connection until it has a reason to stay on TCP.
func wantStaysByUse(t testing.TB, c, to net.Conn, why Reason) {
	t.Helper()
	useUntil(t, c, func() { send(t, c, to, "a use") }, "it stays", func() bool { return InfoOf(c).Fallback == why })
	wantStays(t, c, why)
}

// isTrying reports whether any connection of the process is moving.
func isTrying() bool {
	running, _, ok := moving.Queue.Counts()
	return running > 0 || !ok
}

// isMoving reports whether any connection of the process is moving, or this one: after the end of an
// attempt, its proposal may still be unanswered.
func isMoving(c net.Conn) bool {
	return isTrying() || !strings.Contains(c.(*sanconn.Conn).Debug(), "state   TCP")
}

func TestDialPolicyNeverTriesNoProvider(t *testing.T) {
	f := useFake(t)
	d := atOnce()
	d.Policy = Never
	c := mustDial(t, d, plainListen(t, "127.0.0.1:0").Addr().String())
	wantFallback(t, c, ReasonPolicy)
	if _, ok := c.(*net.TCPConn); !ok || f.tried() != 0 {
		t.Errorf("a %T; the provider was tried %d times", c, f.tried())
	}
}

func TestDialOtherNetworksGoToNet(t *testing.T) {
	useFake(t)
	path := t.TempDir() + "/socket"
	l, err := Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	before := Stats().Fallbacks[ReasonNetwork]
	c, err := Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if info := InfoOf(c); info.Provider != "unix" {
		t.Errorf("provider %q", info.Provider)
	}
	if n := Stats().Fallbacks[ReasonNetwork] - before; n != 1 {
		t.Errorf("counted %d times", n)
	}
	var why *Unavailable
	if _, err := (&Dialer{Policy: Require}).Dial("unix", path); !errors.As(err, &why) || why.Reason != ReasonNetwork {
		t.Errorf("Dial with Require: %v", err)
	}
	if _, err := (&ListenConfig{Policy: Require}).Listen(context.Background(), "unix", path+"2"); !errors.As(err, &why) || why.Reason != ReasonNetwork {
		t.Errorf("Listen with Require: %v", err)
	}
}

func TestDialBadInputIsTheErrorOfNet(t *testing.T) {
	useFake(t)
	free := freePort(t)
	for _, c := range []struct{ name, network, address string }{
		{"unknown network", "tcp5", "127.0.0.1:1"},
		{"no port", "tcp", "127.0.0.1"},
		{"bad port", "tcp", "127.0.0.1:http2000"},
		{"port out of range", "tcp", "127.0.0.1:65536"},
		{"unknown host", "tcp", "no-such-host.invalid:80"},
		{"family without address", "tcp6", "127.0.0.1:80"},
		{"nobody listens", "tcp", free},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
			defer cancel()
			_, want := new(net.Dialer).DialContext(ctx, c.network, c.address)
			for _, policy := range []Policy{Prefer, Require, Never} {
				_, got := (&Dialer{Policy: policy}).DialContext(ctx, c.network, c.address)
				if policy == Require && !isTCP(c.network) {
					continue // Require's error about other networks comes first
				}
				if want == nil || got == nil || got.Error() != want.Error() {
					t.Errorf("%v: got  %v\nwant %v", policy, got, want)
				}
			}
		})
	}
	if _, err := (&Dialer{Providers: []string{"warp"}}).Dial("tcp", free); err == nil || !strings.Contains(err.Error(), `unknown provider "warp"`) {
		t.Errorf("unknown provider: %v", err)
	}
}

// freePort returns an address of this host where nobody listens.
func freePort(t testing.TB) string {
	t.Helper()
	l := plainListen(t, "127.0.0.1:0")
	l.Close()
	return l.Addr().String()
}

// A dial with Require stops trying to move a connection once its other end has closed it.
func TestDialRequireEndsWithItsPeer(t *testing.T) {
	onlyShm(t)
	l := plainListen(t, "127.0.0.1:0")
	ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{
		ConnectDone: func(string, string, error) { l.Close() }, // the listener has not accepted the connection
	})
	_, err := (&Dialer{Policy: Require}).DialContext(ctx, "tcp", l.Addr().String())
	if reasonOf(err) != ReasonStays || !errors.Is(err, syscall.ECONNRESET) { // otherwise it has waited for all of its time
		t.Errorf("it fails with: %v", err)
	}
}

// When the context of a dial with Require ends while it waits for the peer, the error is net's.
func TestDialRequireEndsWithItsContext(t *testing.T) {
	f := useFake(t)
	waits := make(chan struct{}, 1)
	f.fail = func(ctx context.Context) error {
		waits <- struct{}{}
		<-ctx.Done()
		return ctx.Err()
	}
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-waits
		cancel()
	}()
	_, err := (&Dialer{Policy: Require}).DialContext(ctx, "tcp", plainListen(t, "127.0.0.1:0").Addr().String())
	wantOpError(t, err, "dial", context.Canceled)
	if reasonOf(err) != ReasonCanceled {
		t.Errorf("the reason is %v", reasonOf(err))
	}
}

// If a provider has found the other end's host, but the connection is not accepted there yet, the dialer
// waits for it, and does not try the next provider, which would carry the connection for good.
func TestTheFirstProviderIsWaitedFor(t *testing.T) {
	first, second := &fake{called: "first"}, &fake{called: "second"}
	useProviders(t, first, second)
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	c := mustDial(t, atOnce(), l.Addr().String())
	waitFor(t, "a move is tried in vain", func() bool { return first.tried() > 1 })
	mustAccept(t, l)
	wantMoved(t, c, "first")
	if n := second.tried(); n != 0 {
		t.Errorf("%d moves to the second", n)
	}
}
