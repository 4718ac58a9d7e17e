package san

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
)

// What a provider answers, and how the dial ends (C4). There is a TCP listener in each
// case.
func TestDialFallsBackUnlessTCPWouldFailToo(t *testing.T) {
	for _, c := range []struct {
		name   string
		answer error
		reason Reason        // of the fallback
		final  syscall.Errno // or the error that stays
	}{
		{name: "no SAN listener", answer: &Unavailable{Reason: ReasonNoListener}, reason: ReasonNoListener},
		{name: "another version", answer: &Unavailable{Reason: ReasonVersion}, reason: ReasonVersion},
		{name: "another owner", answer: fmt.Errorf("shm: %w", &Unavailable{Reason: ReasonOwner}), reason: ReasonOwner},
		{name: "time-out", answer: os.NewSyscallError("connect", syscall.ETIMEDOUT), reason: ReasonTimeout},
		{name: "no route over the SAN", answer: syscall.ENETUNREACH, reason: ReasonUnreachable},
		{name: "not permitted", answer: os.NewSyscallError("socket", syscall.EACCES), reason: ReasonPermission},
		{name: "out of descriptors", answer: os.NewSyscallError("socket", syscall.EMFILE), reason: ReasonResources},
		{name: "out of memory", answer: syscall.ENOMEM, reason: ReasonResources},
		{name: "nonsense", answer: errors.New("magic 0x1234"), reason: ReasonProtocol},
		{name: "refused", answer: os.NewSyscallError("connect", syscall.ECONNREFUSED), final: syscall.ECONNREFUSED},
		{name: "host unreachable", answer: syscall.EHOSTUNREACH, final: syscall.EHOSTUNREACH},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := useFake(t)
			f.fail = func(context.Context, request) error { return c.answer }
			addr := plainListen(t, "127.0.0.1:0").Addr().String()

			before := Stats()
			conn, err := new(Dialer).Dial("tcp", addr)
			if c.final != 0 {
				oe := wantOpError(t, err, "dial", c.final)
				if oe.Addr == nil || oe.Addr.String() != addr {
					t.Errorf("the error names %v, want %s", oe.Addr, addr)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			wantFallback(t, conn, c.reason)
			after := Stats()
			if n := after.Fallbacks[c.reason] - before.Fallbacks[c.reason]; n != 1 {
				t.Errorf("counted %d times", n)
			}
			if n := after.Dialed["tcp"] - before.Dialed["tcp"]; n != 1 {
				t.Errorf("%d TCP connections counted", n)
			}

			_, err = (&Dialer{Policy: Require}).Dial("tcp", addr)
			wantOpError(t, err, "dial", err)
			if why := (*Unavailable)(nil); errors.As(err, &why) && why.Reason != c.reason {
				t.Errorf("with Require the reason is %v: %v", why.Reason, err)
			} else if !strings.Contains(err.Error(), "no SAN connection") {
				t.Errorf("with Require the error is %v", err)
			}
		})
	}
}

func TestDialPolicyNeverTriesNoProvider(t *testing.T) {
	f := useFake(t)
	c := mustDial(t, &Dialer{Policy: Never}, plainListen(t, "127.0.0.1:0").Addr().String())
	wantFallback(t, c, ReasonPolicy)
	if f.tried() != 0 {
		t.Error("the provider was tried")
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
			_, got := new(Dialer).DialContext(ctx, c.network, c.address)
			if want == nil || got == nil || got.Error() != want.Error() {
				t.Errorf("got  %v\nwant %v", got, want)
			}
			if _, err := (&Dialer{Policy: Require}).DialContext(ctx, c.network, c.address); err == nil {
				t.Error("no error with Require")
			}
		})
	}
	if _, err := (&Dialer{Providers: []string{"warp"}}).Dial("tcp", free); err == nil || !strings.Contains(err.Error(), `unknown provider "warp"`) {
		t.Errorf("unknown provider: %v", err)
	}
}

// freePort is an address of this host where nobody listens.
func freePort(t testing.TB) string {
	t.Helper()
	l := plainListen(t, "127.0.0.1:0")
	l.Close()
	return l.Addr().String()
}

// A server that writes first, and one that counts what it receives: neither sees a byte
// that is not the application's.
func TestDialPlainServerSeesTheApplicationAlone(t *testing.T) {
	for _, policy := range []Policy{Prefer, Never} {
		t.Run(policy.String(), func(t *testing.T) {
			l := plainListen(t, "127.0.0.1:0")
			c := mustDial(t, &Dialer{Policy: policy}, l.Addr().String())
			s := mustAccept(t, l)
			send(t, s, c, "220 ready\r\n")
			send(t, c, s, "EHLO\r\n")
			c.Close()
			rest, err := io.ReadAll(s)
			if err != nil || len(rest) != 0 {
				t.Errorf("%d more bytes: %q, %v", len(rest), rest, err)
			}
		})
	}
}
