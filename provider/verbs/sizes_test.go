//go:build linux && cgo

package verbs

import (
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/regcache"
	"github.com/sanconn/san/session"
	"github.com/sanconn/san/test/hwsim"
)

// The library never requests a registration, message or transfer that is larger than the device permits:
// larger ones are cut.
func TestSizesOfTheDevice(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return // only where hwsimRuns sets the simulated device's limits
	}
	const registration, transfer = 1 << 20, 64 << 10
	for _, windows := range []bool{false, true} {
		cfg := Config{}
		if !windows {
			cfg.Disable = session.FeatureWindows
		}
		l := listen(t, cfg)
		l.windows = windows
		x, y, err := connect(l, cfg)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range []*Endpoint{x, y} {
			if e.limits.MaxExpose != registration || e.limits.MaxRDMA != transfer {
				t.Errorf("it exposes %d bytes and moves %d, want %d and %d", e.limits.MaxExpose, e.limits.MaxRDMA, registration, transfer)
			}
			if _, err := e.mem.Expose(make([]byte, registration+1), session.RemoteRead); err == nil {
				t.Error("it exposes more than the device registers")
			}
			if r, err := e.dom.cache.Acquire(make([]byte, 3*registration), regcache.LocalRead); err == nil {
				t.Error("it registers more than the device does")
				r.Release()
			}
		}
		had := x.dom.cache.Stats()
		a, b := negotiate(t, x, y, session.Config{})
		sent, got := make([]byte, 16<<20), make([]byte, 16<<20)
		for range 3 { // the first goes through the send buffer, later ones by offers
			rand.NewChaCha8([32]byte{1}).Read(sent)
			clear(got)
			carry(t, a, b, sent, got)
		}
		st := a.Stats()
		if st.OfferedBytesSent == 0 || windows && st.OffersSent < uint64(len(sent)/registration) {
			t.Errorf("windows %v: %d offers, %d bytes by RDMA", windows, st.OffersSent, st.OfferedBytesSent)
		}
		if now := x.dom.cache.Stats(); now.Failed != had.Failed {
			t.Errorf("the device refused %d registrations", now.Failed-had.Failed)
		}
	}
}

// If a device permits only registrations that are smaller than the usual message buffers, it gets
// smaller buffers, and all bytes arrive.
func TestSmallRegistrations(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return // only where hwsimRuns sets the simulated device's limits
	}
	x, y, err := connect(listen(t, Config{}), Config{})
	if err != nil {
		t.Fatal(err)
	}
	if x.dev.most.registration >= defaultBuffers*defaultBufferSize {
		t.Fatalf("it registers %d bytes", x.dev.most.registration)
	}
	a, b := negotiate(t, x, y, session.Config{})
	sent, got := make([]byte, 1<<20+1), make([]byte, 1<<20+1)
	for range 3 {
		rand.NewChaCha8([32]byte{1}).Read(sent)
		clear(got)
		carry(t, a, b, sent, got)
	}
	if failed := x.dom.cache.Stats().Failed; failed != 0 {
		t.Errorf("the device refused %d registrations", failed)
	}
}

// A device whose queues or registrations are too small for a connection serves no connection, and none
// is tried.
func TestDeviceTooSmall(t *testing.T) {
	for _, has := range []struct{ wr, cqe int }{{minBuffers - 1, 1 << 20}, {1 << 20, minBuffers}} {
		d := &hardware{ctx: new(ibv.Context), most: sizes{1 << 30, 1 << 30}}
		d.caps.MaxQPWR, d.caps.MaxCQE = has.wr, has.cqe
		if _, err := d.within(Config{}.withDefaults(), maxSends); reasonOf(err) != session.ReasonNotServed {
			t.Errorf("%+v: %v", has, err)
		}
	}
	d := &hardware{ctx: &ibv.Context{Device: ibv.Device{Name: "sim0"}}, most: sizes{1 << 30, 300}} // does not report its queues
	cfg, err := d.within(Config{}.withDefaults(), maxSends)
	if err != nil || cfg.bufferSize != 300 {
		t.Errorf("messages of %d bytes, %v", cfg.bufferSize, err)
	}
	d.most = sizes{minBuffers*session.MaxControl - 1, 1 << 30}
	if _, err = d.within(Config{}.withDefaults(), maxSends); reasonOf(err) != session.ReasonNotServed || !strings.Contains(err.Error(), "a registration of sim0 has ") {
		t.Errorf("registrations of %d bytes: %v", d.most.registration, err)
	}
}
