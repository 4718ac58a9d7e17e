package regcache

import (
	"runtime"
	"syscall"
	"testing"
)

func TestAnObjectIsRegisteredFromItsStart(t *testing.T) {
	d := &fakeDevice{}
	c := newCache(t, d, Config{})
	b := make([]byte, 64<<10)
	release(t, acquireAgain(t, c, b[30_000:], LocalRead))
	release(t, acquireAgain(t, c, b, LocalRead))
	expectRegistrations(t, d, 1)
	runtime.KeepAlive(b)
}

// If the device has no room for a whole object, the acquired part is registered.
func TestThePartIsRegisteredWhenTheDeviceHasNoRoomForTheWhole(t *testing.T) {
	d := &fakeDevice{limit: 100 << 10}
	c := newCache(t, d, Config{})
	b := make([]byte, 1<<20)
	r := acquireAgain(t, c, b[60<<10:][:64<<10], LocalRead)
	if _, n := r.Range(); n != 64<<10 {
		t.Errorf("%d bytes registered", n)
	}
	release(t, r)
	expectEmpty(t, d)
}

// If the whole object cannot be registered, because of a guard page or the end of a file beside the used
// bytes, the part is cached.
func TestThePartIsCachedWhenTheWholeCannotBeRegistered(t *testing.T) {
	const part = 8 << 10
	d := &fakeDevice{onRegister: func(n int) error {
		if n > part {
			return syscall.EFAULT
		}
		return nil
	}}
	c := newCache(t, d, Config{})
	b := make([]byte, 64<<10)
	declared, err := Declare(b)
	if err != nil {
		t.Fatal(err)
	}
	for range 10 {
		release(t, acquire(t, c, b[part:2*part], LocalRead))
	}
	if s := c.Stats(); s.Hits != 9 || s.Full != 0 {
		t.Errorf("%d hits of 9, %d found no room", s.Hits, s.Full)
	}
	if err := declared.Withdraw(); err != nil {
		t.Error(err)
	}
}

func TestOverlappingRegistrationsMerge(t *testing.T) {
	d := &fakeDevice{}
	c := newCache(t, d, Config{Budget: NewBudget(1<<30, 100)})
	b := make([]byte, 64<<20) // too large to be registered as a whole object
	release(t, acquireAgain(t, c, b[0:8<<20], LocalRead))
	release(t, acquireAgain(t, c, b[4<<20:12<<20], LocalRead))
	release(t, acquireAgain(t, c, b[0:12<<20], LocalRead))
	expectRegistrations(t, d, 2)
	if s := c.Stats(); s.Merges != 1 || s.Entries != 1 {
		t.Errorf("%d merges, %d entries; want 1, 1", s.Merges, s.Entries)
	}
	runtime.KeepAlive(b)
}

// An object that is used in overlapping steps is not registered from its start again and again.
func TestMergedRegistrationsStopGrowing(t *testing.T) {
	d := &fakeDevice{}
	c := newCache(t, d, Config{Budget: NewBudget(1<<30, 1000)})
	b := make([]byte, 256<<20)
	const step = 1 << 20
	for at := 0; at+2*step <= len(b); at += step {
		release(t, acquireAgain(t, c, b[at:at+step+1], LocalRead))
	}
	for _, r := range d.live {
		if n := r.end - r.start; n > mergeGrowth*(step+1) {
			t.Errorf("a step of %d bytes grew to a registration of %d", step, n)
		}
	}
	runtime.KeepAlive(b)
}

func TestALargeObjectSentPieceByPieceIsRegisteredOnce(t *testing.T) {
	for name, acquire := range map[string]func(testing.TB, *Cache, []byte, Access) *Region{
		"at its first use": acquire, "at its second": acquireAgain,
	} {
		registered := 0
		d := &fakeDevice{onRegister: func(n int) error { registered += n; return nil }}
		c := newCache(t, d, Config{Budget: NewBudget(1<<30, 1000)})
		b := make([]byte, 64<<20)
		const piece = 1 << 20
		for at := 0; at < len(b); at += piece {
			release(t, acquire(t, c, b[at:at+piece], LocalRead))
		}
		if limit := len(b) + 4*piece; registered > limit {
			t.Errorf("%s: %d bytes were registered to send %d", name, registered, len(b))
		}
		runtime.KeepAlive(b)
	}
}
