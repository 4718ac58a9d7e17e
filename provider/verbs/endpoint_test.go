package verbs

import (
	"net/netip"
	"runtime"
	"testing"
	"time"

	"github.com/sanconn/san/internal/endpointtest"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/regcache"
	"github.com/sanconn/san/session"
	"github.com/sanconn/san/test/hwsim"
)

func TestPing(t *testing.T) {
	l := listen(t, Config{})
	a, b, err := connect(l, Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer a.discard()
	defer b.discard()
	t.Logf("%s, inline %d", a.dev.ctx.Name, a.send.inline)
	begin(a)
	begin(b)
	room := a.Reserve(5, 5)
	a.Commit(copy(room, "hello"))
	var ev session.Event
	for began := time.Now(); !b.Poll(&ev); runtime.Gosched() {
		if err := b.Err(); err != nil {
			t.Fatal(err)
		}
		if time.Since(began) > patience {
			t.Fatal("no message; the sender's error:", a.Err())
		}
	}
	if string(ev.Msg) != "hello" {
		t.Errorf("got %q", ev.Msg)
	}
	b.Drop()
}

// Each connection that is dialed is also accepted, whatever is late at either end.
func TestEveryDialIsAccepted(t *testing.T) {
	l := listen(t, Config{})
	for i := range 400 {
		a, b, err := connect(l, Config{})
		if err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
		a.discard()
		b.discard()
	}
}

// Many connections exist at the same time, after other queues have been made and destroyed.
func TestManyAtATime(t *testing.T) {
	l := listen(t, Config{})
	for range 2 {
		var all []*Endpoint
		for i := range 40 {
			a, b, err := connect(l, Config{})
			if err != nil {
				t.Errorf("connection %d: %v", i, err)
				break
			}
			all = append(all, a, b)
		}
		for _, e := range all {
			e.discard()
		}
	}
}

// The contract of session.Endpoint.
func TestEndpoint(t *testing.T) {
	smallArena(t)
	unshared := []string{"by the peer of another connection"}
	for _, tt := range []struct {
		name    string
		cfg     Config
		windows bool
		lacks   []string
	}{
		{"default", Config{}, false, nil},
		{"smallest", Config{buffers: minBuffers, bufferSize: session.MaxControl, sendBuffer: 1}, false, nil},
		{"without rdma_cm", Config{WithoutCM: true}, false, nil},
		{"without windows", Config{Disable: session.FeatureWindows}, false, nil},
		{"windows", Config{}, true, lacksWindows},
		{"shared domain", Config{SharedDomain: true}, false, unshared},
		{"windows, shared domain", Config{SharedDomain: true}, true, lacksWindows},
	} {
		if (tt.cfg.WithoutCM || tt.windows) && testenv.Device() == "siw" {
			continue // iWARP cannot do without rdma_cm, and siw has no windows
		}
		if tt.cfg.SharedDomain && without(session.FeatureWindows) {
			tt.lacks = unshared
		} else if testenv.Device() == hwsim.Lane && tt.windows {
			tt.lacks = nil
		}
		t.Run(tt.name, func(t *testing.T) {
			nothingLeft(t)
			keepOpen(t, tt.cfg)
			l := listen(t, tt.cfg)
			l.windows = tt.windows
			endpointtest.Run(t, func() (a, b session.Endpoint, stop func(), err error) {
				x, y, err := connect(l, tt.cfg)
				if err != nil {
					return nil, nil, nil, err
				}
				mustHave(t, x, tt.cfg, tt.windows)
				mustHave(t, y, tt.cfg, tt.windows)
				return x, y, func() {}, nil
			}, append(lacks(), tt.lacks...)...)
		})
	}
}

// keepOpen keeps the devices of both ends open. Otherwise each connection would open them again, which
// takes a second in the guest.
func keepOpen(t *testing.T, cfg Config) {
	if !cfg.WithoutCM {
		return
	}
	dialer, listener := cable(t)
	for _, addr := range []netip.Addr{dialer, listener} {
		at, err := attach(addr, cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(at.dev.release)
	}
}

// smallArena makes the process's arena small, for a test that uses it up: on a host with much memory it
// has gigabytes.
func smallArena(t *testing.T) {
	const size = 64 << 20
	arena := regcache.DefaultArena()
	_, used := arena.Bytes()
	was := arena.Left() + used
	regcache.SetArenaLimit(min(size, was))
	t.Cleanup(func() { regcache.SetArenaLimit(was) })
}

// mustHave checks that an endpoint has the features that its config and the test require.
func mustHave(t testing.TB, e *Endpoint, cfg Config, windows bool) {
	t.Helper()
	// Windows are also used, and the domain may be shared, once the probe has found that they can be
	// trusted.
	want := windows && !without(session.FeatureWindows)
	probed := (testenv.Device() == hwsim.Lane || testenv.Device() == hardwareLane) && (cfg.Disable|switchedOff())&session.FeatureWindows == 0
	on := e.mem.windows.on()
	if on != want && !probed {
		t.Errorf("windows: %v, want %v", on, want)
	}
	if e.dom.shared != cfg.SharedDomain && !(probed && on && e.dom.shared) {
		t.Errorf("shared domain: %v, want %v", e.dom.shared, cfg.SharedDomain)
	}
	if off := (cfg.Disable|switchedOff())&session.FeatureRDMAWrite != 0; e.limits.CanWrite == off {
		t.Errorf("RDMA write: %v, switched off: %v", e.limits.CanWrite, off)
	}
}

// lacksWindows are the attempts on a window that rxe does not prevent. It checks the bounds of the
// registration instead of the window's. When a window is invalidated, it does not wait for the packet
// that it is just building (rxe_resp.c, read_reply). So windows are used on rxe only in tests.
var lacksWindows = []string{
	"by a longer descriptor", "by an endless descriptor", "in front", "in front, around the address space",
	"under way",
}

// lacks returns what the device does not prevent. siw serves reads of memory that is exposed only for
// writing. When memory is deregistered, it does not wait for the read or write that it is just serving
// (siw_dereg_mr); the session asks the peer to stop before it revokes.
func lacks() []string {
	if testenv.Device() == "siw" {
		return []string{"without the right", "under way"}
	}
	return nil
}
