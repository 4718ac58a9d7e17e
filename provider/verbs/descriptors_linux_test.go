package verbs

import (
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/rdmalink"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/session"
)

// A listener that begins without free descriptors reports that, and listens once there are some.
func TestListenerWithoutDescriptors(t *testing.T) {
	addr := cableOfAll(t)
	for _, cfg := range []Config{{}, {WithoutCM: true}} {
		if cfg.WithoutCM && testenv.Device() == "siw" {
			continue // it needs rdma_cm
		}
		for _, a := range []netip.Addr{addr, netip.IPv6Unspecified()} {
			at := netip.AddrPortFrom(addr, freePort())
			var l *listener
			var err error
			testenv.WithoutDescriptors(t, func() { l, err = listenAt(netip.AddrPortFrom(a, at.Port()), cfg) })
			if err != nil {
				t.Errorf("%v, %+v: %v", a, cfg, err)
				continue
			}
			if err := l.Waiting(); reasonOf(err) != session.ReasonResources {
				t.Errorf("%v, %+v: without descriptors: %v", a, cfg, err)
			}
			testenv.Eventually(t, patience, func() error { // an address may be tried before there are descriptors again
				if has := l.addrs(); !cfg.WithoutCM && !slices.Contains(has, at) {
					return fmt.Errorf("it listens on %v", has)
				}
				return l.Waiting()
			})
			meetAt(t, l, at, cfg)
			l.Close()
		}
	}
}

// A listener that finds no descriptors while it looks up the addresses goes on listening.
func TestListenerLooksWithoutDescriptors(t *testing.T) {
	addr := cableOfAll(t)
	at := netip.AddrPortFrom(addr, freePort())
	l, err := listenAt(netip.AddrPortFrom(netip.IPv6Unspecified(), at.Port()), Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	had := len(l.addrs())
	testenv.WithoutDescriptors(t, func() { err = l.refresh(true) })
	if reasonOf(err) != session.ReasonResources || l.Waiting() != nil || len(l.addrs()) != had {
		t.Errorf("%v, waits for %v, listens on %v, and had %d addresses", err, l.Waiting(), l.addrs(), had)
	}
	meetAt(t, l, at, Config{})
}

// It looks again soon, however long there are no descriptors. It does so, too, while another process has
// the port.
func TestListenerLooksAgainSoon(t *testing.T) {
	const retry = 3 * retryTime
	for err, want := range map[error]time.Duration{
		nil: rescanTime, unix.EMFILE: retryTime, unix.EADDRINUSE: retryTime, unix.ENODEV: retry, unix.EINVAL: retry,
	} {
		if got := nextLook(listenError(err), retry); got != want {
			t.Errorf("%v: after %v, want %v", err, got, want)
		}
	}
}

// If a search for devices fails for lack of descriptors, the result that there is none is not kept.
func TestDevicesWithoutDescriptors(t *testing.T) {
	forget := func() {
		rdmaDevices.mu.Lock()
		defer rdmaDevices.mu.Unlock()
		rdmaDevices.names = nil
		bare.mu.Lock()
		defer bare.mu.Unlock()
		bare.at = time.Time{}
	}
	forget()
	t.Cleanup(forget)
	testenv.WithoutDescriptors(t, func() {
		if name := DeviceOf("lo"); name != "" {
			t.Errorf("%q without descriptors", name)
		}
		if name := bareDevice(); name != "" {
			t.Errorf("%q without descriptors", name)
		}
		if !HaveDevices() {
			t.Error("it is known that there are none")
		}
	})
	if rdmaDevices.names != nil || !bare.at.IsZero() {
		t.Error("it is remembered that there is none")
	}
}

// The same whether the descriptors are lacking at the beginning of the search or at its end.
func TestSearchWithoutDescriptors(t *testing.T) {
	tried := tryNode
	t.Cleanup(func() { tryNode = tried })
	lack := &fs.PathError{Op: "open", Path: "x", Err: unix.EMFILE}
	for _, c := range []struct {
		before, behind error
		sure           bool
	}{{nil, nil, true}, {lack, nil, false}, {nil, lack, false}} {
		lacking := c.before
		tryNode = func(string) error { return lacking }
		if err := searched(func() error { lacking = c.behind; return nil }); (err == nil) != c.sure {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

// If descriptors are lacking only in the middle of the search, there may still be a device.
func TestDescriptorsLackingWhileLooking(t *testing.T) {
	tried := tryNode
	tryNode = func(path string) error { return &fs.PathError{Op: "open", Path: path, Err: unix.EMFILE} }
	rdmalink.Simulated = map[string]string{"another": "sim0"}
	t.Cleanup(func() { tryNode, rdmalink.Simulated = tried, nil })
	at := netip.MustParseAddr("127.0.0.1")
	if a, err := attach(at, Config{}); reasonOf(err) != session.ReasonResources {
		t.Errorf("%v, %v", a, err)
	}
	if list, err := servedAddresses(netip.IPv4Unspecified(), false); reasonOf(err) != session.ReasonResources {
		t.Errorf("served are %v, %v", list, err)
	}
	if err := exchangeServes([]netip.Addr{at}); err != nil {
		t.Error(err)
	}
}

// If there are no descriptors to search for a device, the reason is not that there is no device.
func TestServedWithoutDescriptors(t *testing.T) {
	rdmalink.Simulated = map[string]string{"lo": "sim0"}
	t.Cleanup(func() { rdmalink.Simulated = nil })
	testenv.WithoutDescriptors(t, func() {
		if device, err := ServedBy(netip.MustParseAddr("127.0.0.1"), Route{}, Config{}); reasonOf(callError(err)) != session.ReasonResources {
			t.Errorf("%q, %v", device, err)
		}
		if at, err := attach(netip.MustParseAddr("127.0.0.1"), Config{}); reasonOf(err) != session.ReasonResources {
			t.Errorf("%v, %v", at, err)
		}
	})
}
