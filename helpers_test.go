package san

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"github.com/sanconn/san/internal/reason"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/sanconn"
)

// testTimeout is how long a test waits for something that must happen. A test that reaches it has
// failed.
const testTimeout = 30 * time.Second

// inGuest is the device on which the tests run, if they run in the guest (test/guest), which is emulated
// and some fifty times slower.
var inGuest = testenv.Device()

// amount returns how much of something a test does, which is less in the guest.
func amount[T int | int64](elsewhere, guest T) T {
	if inGuest != "" {
		return guest
	}
	return elsewhere
}

func mustListen(t testing.TB, lc *ListenConfig, network, address string) *Listener {
	t.Helper()
	l, err := lc.Listen(context.Background(), network, address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l.(*Listener)
}

// plainListen returns a TCP listener without SANs.
func plainListen(t testing.TB, address string) *net.TCPListener {
	t.Helper()
	l, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l.(*net.TCPListener)
}

func mustDial(t testing.TB, d *Dialer, address string) net.Conn {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	defer cancel()
	c, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func mustAccept(t testing.TB, l net.Listener) net.Conn {
	t.Helper()
	if d, ok := l.(interface{ SetDeadline(time.Time) error }); ok {
		d.SetDeadline(time.Now().Add(testTimeout))
		defer d.SetDeadline(time.Time{})
	}
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func wantProvider(t testing.TB, c net.Conn, provider string) {
	t.Helper()
	if info := InfoOf(c); info.Provider != provider {
		t.Fatalf("provider %q (fallback %v: %v), want %q", info.Provider, info.Fallback, info.Cause, provider)
	}
}

func wantFallback(t testing.TB, c net.Conn, why Reason) {
	t.Helper()
	if info := InfoOf(c); info.Provider != providerTCP || info.Fallback != why {
		t.Fatalf("provider %q for reason %q (%v), want tcp for %q", info.Provider, info.Fallback, info.Cause, why)
	}
}

// wantMoved waits until a connection has moved to a provider.
func wantMoved(t testing.TB, c net.Conn, provider string) {
	t.Helper()
	sc, ok := c.(*sanconn.Conn)
	if !ok {
		t.Fatalf("a %T, which does not move", c)
	}
	testenv.Eventually(t, testTimeout, func() error {
		if info := InfoOf(sc); info.Provider != provider {
			return fmt.Errorf("provider %q for reason %q (%v), want %q", info.Provider, info.Fallback, info.Cause, provider)
		}
		return nil
	})
}

// wantStays waits until a connection has a reason to stay on TCP.
func wantStays(t testing.TB, c net.Conn, why Reason) {
	t.Helper()
	testenv.Eventually(t, testTimeout, func() error {
		if info := InfoOf(c); info.Provider != providerTCP || info.Fallback != why {
			return fmt.Errorf("provider %q for reason %q (%v), want tcp for %q", info.Provider, info.Fallback, info.Cause, why)
		}
		return nil
	})
}

// send writes text to one end and expects it at the other.
func send(t testing.TB, from, to net.Conn, text string) {
	t.Helper()
	from.SetDeadline(time.Now().Add(testTimeout))
	to.SetDeadline(time.Now().Add(testTimeout))
	if n, err := io.WriteString(from, text); n != len(text) || err != nil {
		t.Fatalf("wrote %d of %d bytes: %v", n, len(text), err)
	}
	got := make([]byte, len(text))
	if _, err := io.ReadFull(to, got); err != nil {
		t.Fatal(err)
	}
	if string(got) != text {
		t.Fatalf("read %q, want %q", got, text)
	}
	from.SetDeadline(time.Time{})
	to.SetDeadline(time.Time{})
}

// wantOpError checks that err is as net would return it: a *net.OpError of the operation, which wraps
// target.
func wantOpError(t testing.TB, err error, op string, target error) *net.OpError {
	t.Helper()
	var oe *net.OpError
	if !errors.As(err, &oe) || oe.Op != op || !errors.Is(err, target) {
		t.Fatalf("error %v (%T), want a *net.OpError of %s around %v", err, err, op, target)
	}
	if oe.Net != "tcp" {
		t.Errorf("network %q in %v", oe.Net, err)
	}
	return oe
}

// waitFor polls until a condition holds that other goroutines bring about.
func waitFor(t testing.TB, what string, ok func() bool) {
	t.Helper()
	testenv.Eventually(t, testTimeout, func() error {
		if !ok() {
			return errors.New(what)
		}
		return nil
	})
}

// reasonOf returns the reason of an error, or ReasonNone if there is no error.
func reasonOf(err error) Reason {
	if err == nil {
		return ReasonNone
	}
	return reason.Of(err).Reason
}

func portOf(address string) string {
	_, port, _ := net.SplitHostPort(address)
	return port
}
