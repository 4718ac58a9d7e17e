package verbs

import (
	"errors"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/session"
)

// A listener whose port another process has waits, and listens once the port is free.
func TestListenerTakesOver(t *testing.T) {
	cable(t)
	for _, cfg := range []Config{{}, {WithoutCM: true}} {
		if cfg.WithoutCM && testenv.Device() == "siw" {
			continue // it needs rdma_cm
		}
		old := listen(t, cfg)
		at := old.addrs()[0]
		l, err := listenAt(at, cfg)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		if err := l.Waiting(); !errors.Is(err, syscall.EADDRINUSE) || reasonOf(err) != session.ReasonResources {
			t.Errorf("behind another: %v", err)
		}
		if err := old.Waiting(); err != nil {
			t.Errorf("the one that listens: %v", err)
		}
		meetAt(t, old, at, cfg)
		old.Close()
		testenv.Eventually(t, patience, l.Waiting)
		meetAt(t, l, at, cfg)
	}
}

// While a listener on all addresses waits for its port, it tries again without looking up the addresses
// each time.
func TestListenerThatWaitsDoesNotLook(t *testing.T) {
	at := netip.AddrPortFrom(cableOfAll(t), freePort())
	all := netip.AddrPortFrom(netip.IPv6Unspecified(), at.Port())
	old, err := listenAt(all, Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer old.Close()
	wait := func() *listener {
		l, err := listenAt(all, Config{})
		if err != nil {
			t.Fatal(err)
		}
		if err := l.Waiting(); !errors.Is(err, syscall.EADDRINUSE) {
			t.Errorf("behind another: %v", err)
		}
		return l
	}
	testenv.Eventually(t, patience, func() error { // an interface may have changed, so a look is possible
		l, began := wait(), time.Now()
		time.Sleep(5 * retryTime)
		if l.Close(); l.looked.After(began) {
			return errors.New("it has looked")
		}
		return nil
	})
	l := wait()
	defer l.Close()
	old.Close()
	testenv.Eventually(t, patience, l.Waiting)
	meetAt(t, l, at, Config{})
}

// meetAt makes a connection to a listener.
func meetAt(t *testing.T, l *listener, at netip.AddrPort, cfg Config) {
	t.Helper()
	a, err := Dial(patient(t), netip.Addr{}, at, cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer a.discard()
	b, err := accept(l)
	if err != nil {
		t.Fatal(err)
	}
	b.discard()
}

// A listener that is closed while it waits ends.
func TestListenerThatWaitsIsClosed(t *testing.T) {
	cable(t)
	for _, cfg := range []Config{{}, {WithoutCM: true}} {
		if cfg.WithoutCM && testenv.Device() == "siw" {
			continue
		}
		old := listen(t, cfg)
		l, err := listenAt(old.addrs()[0], cfg)
		if err != nil {
			t.Fatal(err)
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		meetAt(t, old, old.addrs()[0], cfg)
	}
}
