package regcache

import (
	"runtime"
	"testing"
)

func TestAnExposureIsExactAndEndsWithRelease(t *testing.T) {
	d := &fakeDevice{}
	c := newCache(t, d, Config{})
	b := make([]byte, 64<<10)
	part := b[1000:2000]
	for round := range 3 {
		r := acquireAgain(t, c, part, RemoteRead)
		if start, n := r.Range(); start != addressOf(part) || n != len(part) {
			t.Errorf("[%#x, +%d) is exposed, want [%#x, +%d)", start, n, addressOf(part), len(part))
		}
		if r.access != RemoteRead {
			t.Errorf("exposed for %v", r.access)
		}
		if entries, _ := d.registered(); entries != 2 {
			t.Errorf("round %d: %d registrations, want the exposed and the pinned one", round, entries)
		}
		key := r.RKey()
		release(t, r)
		if err := d.covers(key, part, LocalRead); err == nil {
			t.Error("the exposed registration survived its release")
		}
	}
	expectRegistrations(t, d, 4) // one of them keeps the pages pinned
	for key := range d.live {
		if access := d.live[key].access; access&remoteAccess != 0 {
			t.Errorf("what is left grants %v", access)
		}
	}
	runtime.KeepAlive(b)
}

func TestAnExposureNeedsNoRoomForItsPin(t *testing.T) {
	d := &fakeDevice{limit: 100 << 10} // RLIMIT_MEMLOCK counts both
	c := newCache(t, d, Config{})
	b := make([]byte, 64<<10)
	r := acquireAgain(t, c, b, RemoteWrite)
	if entries, _ := d.registered(); entries != 1 {
		t.Errorf("%d registrations", entries)
	}
	release(t, r)
	expectEmpty(t, d)
}

func TestWindowsShareTheCachedRegistration(t *testing.T) {
	d := &fakeDevice{}
	c := newCache(t, d, Config{})
	b := make([]byte, 64<<10)
	for range 3 {
		r := acquireAgain(t, c, b[:1000], BindWindow)
		if r.access&remoteAccess != 0 || r.access&BindWindow == 0 {
			t.Errorf("rights %v, want to bind only", r.access)
		}
		release(t, r)
	}
	expectRegistrations(t, d, 1)
	r := acquireAgain(t, c, b, BindWindow|LocalWrite)
	if r.access&(LocalWrite|BindWindow) != LocalWrite|BindWindow {
		t.Errorf("a window for writing cannot be bound on %v", r.access)
	}
	release(t, r)
}
