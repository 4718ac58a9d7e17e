package regcache

import (
	"errors"
	"runtime"
	"syscall"
	"testing"
)

// Whatever part of whichever object is acquired, and whatever is registered already, no registration is
// larger than the device accepts.
func TestNoRegistrationIsLargerThanTheDeviceTakes(t *testing.T) {
	const most = 1 << 20
	d := &fakeDevice{}
	d.onRegister = func(n int) error {
		if n > most {
			t.Errorf("a registration of %d bytes", n)
		}
		return nil
	}
	c := newCache(t, d, Config{MaxRegistration: most})
	b := make([]byte, 3*most)
	for step := range 20 { // overlapping parts
		part := b[step*100_000:][:most]
		r := acquireAgain(t, c, part, LocalRead)
		if err := d.covers(r.LKey(), part, LocalRead); err != nil {
			t.Error(err)
		}
		release(t, r)
	}
	rear := make([]byte, 2*most)[600_000:][:most] // otherwise its object would be registered from its start
	release(t, acquireAgain(t, c, rear, LocalRead))
	release(t, acquire(t, c, rear[1000:], LocalRead))
	if s := c.Stats(); s.Hits != 1 || s.Refused+s.Failed != 0 {
		t.Errorf("%d hits, %d registrations were tried in vain", s.Hits, s.Refused+s.Failed)
	}
	made := d.made
	for _, access := range []Access{LocalRead, LocalWrite, RemoteRead} {
		if _, err := c.Acquire(b[:most+1], access); !errors.Is(err, syscall.ENOBUFS) {
			t.Errorf("%v of more than the device takes: %v", access, err)
		}
	}
	for range 2 { // even if the memory is used again
		if worth(c, b, LocalRead) {
			t.Error("what cannot be registered is worth it")
		}
	}
	if s := c.Stats(); s.Flushes != 0 || d.made != made {
		t.Errorf("%d flushes, %d registrations", s.Flushes, d.made-made)
	}
	runtime.KeepAlive(b)
	runtime.KeepAlive(rear)
}
