package san

import (
	"context"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"
)

func TestDialSilentSANCostsOneDelay(t *testing.T) {
	f := useFake(t)
	f.fail = func(ctx context.Context, _ request) error {
		<-ctx.Done()
		return ctx.Err()
	}
	addr := plainListen(t, "127.0.0.1:0").Addr().String()
	d := &Dialer{}
	d.Options.AttemptTimeout = minSilence
	wantFallback(t, mustDial(t, d, addr), ReasonTimeout)
	wantFallback(t, mustDial(t, d, addr), ReasonRemembered)
	if n := f.tried(); n != 1 {
		t.Errorf("%d attempts", n)
	}

	other := plainListen(t, "127.0.0.1:0").Addr().String()
	wantFallback(t, mustDial(t, d, other), ReasonTimeout)

	r := &Dialer{Policy: Require, Options: d.Options}
	_, err := r.Dial("tcp", addr)
	if ne, ok := err.(net.Error); !ok || !ne.Timeout() {
		t.Errorf("with Require: %v, want a time-out", err)
	}
	if n := f.tried(); n != 3 {
		t.Errorf("Require was answered from memory (%d attempts)", n)
	}
}

// A destination that answers is tried again at once, whatever it did before.
func TestDialSuccessIsRemembered(t *testing.T) {
	f := useFake(t)
	f.fail = func(ctx context.Context, _ request) error {
		<-ctx.Done()
		return ctx.Err()
	}
	addr := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0").Addr().String()
	d := &Dialer{}
	d.Options.AttemptTimeout = minSilence
	wantFallback(t, mustDial(t, d, addr), ReasonTimeout)
	f.fail = nil
	wantFallback(t, mustDial(t, &Dialer{}, addr), ReasonRemembered)
	wantProvider(t, mustDial(t, &Dialer{Policy: Require}, addr), fakeName) // which tries all the same
	wantProvider(t, mustDial(t, &Dialer{}, addr), fakeName)
}

// A dialer with little time leaves half of it to TCP. If its wait was long enough to prove
// anything, its next dial does not wait again.
func TestDialSilentSANLeavesTimeForTCP(t *testing.T) {
	f := useFake(t)
	f.fail = func(ctx context.Context, _ request) error {
		<-ctx.Done()
		return ctx.Err()
	}
	addr := plainListen(t, "127.0.0.1:0").Addr().String()
	var d Dialer
	d.Options.AttemptTimeout = minSilence - time.Millisecond
	for range 2 {
		wantFallback(t, mustDial(t, &d, addr), ReasonTimeout)
	}
	if n := f.tried(); n != 2 {
		t.Errorf("%d attempts: a moment without an answer was taken for silence", n)
	}
	d.Options.AttemptTimeout = testTimeout
	d.NetDialer.Timeout = 10 * minSilence // half of it for TCP
	wantFallback(t, mustDial(t, &d, addr), ReasonTimeout)
	wantFallback(t, mustDial(t, &d, addr), ReasonRemembered)

	// Others may have another way there.
	d.RDMA.IWARPOffset = 1
	wantFallback(t, mustDial(t, &d, addr), ReasonTimeout)
	d.NetDialer.LocalAddr = &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)}
	wantFallback(t, mustDial(t, &d, addr), ReasonTimeout)
}

// fakeKey is that of a dial to the address by the fake.
func fakeKey(addr string) attemptKey {
	return attemptKey{provider: fakeName, dst: netip.MustParseAddrPort(addr), rdma: processEnvironment().rdma}
}

// Any answer ends the consequences of silence.
func TestDialAnswerIsRemembered(t *testing.T) {
	f := useFake(t)
	addr := plainListen(t, "127.0.0.1:0").Addr().String()
	key := fakeKey(addr)
	dialBackoff.silent = map[attemptKey]silence{key: {until: time.Now(), span: backoffMost}}
	wantFallback(t, mustDial(t, &Dialer{}, addr), ReasonNoListener)
	if _, still := dialBackoff.silent[key]; still {
		t.Error("the next silence costs as long as if there had been no answer")
	}
	if f.tried() != 1 {
		t.Errorf("%d attempts", f.tried())
	}
}

func TestDialOwnImpatienceIsNotRemembered(t *testing.T) {
	f := useFake(t)
	f.fail = func(ctx context.Context, _ request) error {
		<-ctx.Done()
		return ctx.Err()
	}
	addr := plainListen(t, "127.0.0.1:0").Addr().String()
	for _, c := range []struct {
		name    string
		dialer  net.Dialer
		context func() (context.Context, context.CancelFunc)
		target  error
		timeout bool
	}{
		{name: "Timeout", dialer: net.Dialer{Timeout: time.Millisecond}, target: context.DeadlineExceeded, timeout: true},
		{name: "Deadline", dialer: net.Dialer{Deadline: time.Now().Add(time.Millisecond)}, target: context.DeadlineExceeded, timeout: true},
		{name: "context's deadline", context: func() (context.Context, context.CancelFunc) {
			return context.WithTimeout(context.Background(), time.Millisecond)
		}, target: context.DeadlineExceeded, timeout: true},
		{name: "cancelled", context: func() (context.Context, context.CancelFunc) {
			ctx, cancel := context.WithCancel(context.Background())
			cancel()
			return ctx, cancel
		}, target: context.Canceled},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctx, cancel := context.Background(), context.CancelFunc(func() {})
			if c.context != nil {
				ctx, cancel = c.context()
			}
			defer cancel()
			d := &Dialer{NetDialer: c.dialer, Policy: Require}
			d.Options.AttemptTimeout = testTimeout
			_, err := d.DialContext(ctx, "tcp", addr)
			if oe := wantOpError(t, err, "dial", c.target); oe.Timeout() != c.timeout {
				t.Errorf("Timeout() is %v: %v", oe.Timeout(), err)
			}
		})
	}
	f.fail = nil
	wantFallback(t, mustDial(t, &Dialer{}, addr), ReasonNoListener)
}

// A failure at this end proves nothing about the destination.
func TestDialOwnFailureIsNoAnswer(t *testing.T) {
	f := useFake(t)
	addr := plainListen(t, "127.0.0.1:0").Addr().String()
	key := fakeKey(addr)
	for _, err := range []error{syscall.EMFILE, hookError{syscall.ECONNREFUSED}, &Unavailable{Reason: ReasonNotServed}} {
		f.fail = func(context.Context, request) error { return err }
		dialBackoff.silent = map[attemptKey]silence{key: {until: time.Now(), span: backoffMost}}
		if c, err := new(Dialer).Dial("tcp", addr); err == nil {
			c.Close()
		}
		if dialBackoff.silent[key].span != backoffMost {
			t.Errorf("%v was taken for an answer", err)
		}
	}
}
