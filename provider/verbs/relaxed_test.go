//go:build linux && cgo

package verbs

import (
	"testing"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/regcache"
	"github.com/sanconn/san/session"
	"github.com/sanconn/san/test/hwsim"
)

// Memory in which large transfers arrive is registered with relaxed ordering, unless that is switched
// off; no other memory is.
func TestRelaxedOrdering(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return // a real device does not report it
	}
	for _, tt := range []struct {
		what    string
		access  regcache.Access
		relaxed int
	}{
		{"a Write's own memory", regcache.LocalRead, 0},
		{"a Write's own memory, for a window", regcache.BindWindow, 0},
		{"a Write's own memory, exposed without one", regcache.RemoteRead, 0},
		{"the sink of a read", regcache.LocalWrite, 1},
		{"an inbox, for a window", regcache.LocalWrite | regcache.BindWindow, 1},
		{"an inbox, exposed without one", regcache.RemoteWrite, 1},
	} {
		for _, off := range []session.Feature{0, session.FeatureRelaxed} {
			t.Run(tt.what, func(t *testing.T) {
				cfg := Config{Disable: off | session.FeatureWindows}
				a, b, err := connect(listen(t, cfg), cfg)
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(a.discard)
				t.Cleanup(b.discard)
				before := hwsim.Objects(t)
				if before[hwsim.Relaxed] != 0 {
					t.Errorf("of a connection at rest, %d regions have it", before[hwsim.Relaxed])
				}
				region, err := a.dom.cache.Acquire(a.mem.Alloc(victimSize), tt.access)
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { region.Release() })
				after := hwsim.Objects(t)
				if n := after[hwsim.Regions] - before[hwsim.Regions]; n == 0 {
					t.Error("nothing was registered")
				}
				want := tt.relaxed
				if off != 0 {
					want = 0
				}
				if n := after[hwsim.Relaxed]; n != want {
					t.Errorf("%d regions have it, want %d; switched off: %v", n, want, off)
				}
			})
		}
	}
}
