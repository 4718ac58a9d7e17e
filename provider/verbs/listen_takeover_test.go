package verbs

import (
	"errors"
	"net/netip"
	"syscall"
	"testing"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/session"
)

// A listener that takes over waits while another has the port, which without that would be an
// error, and listens once it is free.
func TestListenerTakesOver(t *testing.T) {
	cable(t)
	for _, cfg := range []Config{{}, {WithoutCM: true}} {
		if cfg.WithoutCM && testenv.Device() == "siw" {
			continue // it needs rdma_cm
		}
		old := listen(t, cfg)
		at := old.Addrs()[0]
		if l, err := Listen(at, cfg); !errors.Is(err, syscall.EADDRINUSE) {
			t.Errorf("without TakeOver: %v", err)
			if err == nil {
				l.Close()
			}
		}
		cfg.TakeOver = true
		l, err := Listen(at, cfg)
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

// meetAt makes a connection to a listener.
func meetAt(t *testing.T, l *Listener, at netip.AddrPort, cfg Config) {
	t.Helper()
	a, err := Dial(patient(t), netip.AddrPort{}, at, cfg)
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

// One that is closed before its turn has come ends.
func TestListenerThatWaitsIsClosed(t *testing.T) {
	cable(t)
	for _, cfg := range []Config{{}, {WithoutCM: true}} {
		if cfg.WithoutCM && testenv.Device() == "siw" {
			continue
		}
		old := listen(t, cfg)
		cfg.TakeOver = true
		l, err := Listen(old.Addrs()[0], cfg)
		if err != nil {
			t.Fatal(err)
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		meetAt(t, old, old.Addrs()[0], cfg)
	}
}
