package regcache

import (
	"fmt"
	"sync"
	"syscall"
)

// fakeDevice only records its registrations.
type fakeDevice struct {
	limit           int64                // of all registrations in bytes; 0: no limit
	onRegister      func(n int) error    // if not nil: called before each registration of n bytes, which fails with its error
	onDeregister    func(r registration) // if not nil: called before each deregistration
	deregisterError error                // if not nil: what each deregistration fails with

	mu    sync.Mutex // guards what follows
	live  map[uint32]registration
	bytes int64
	next  uint32
	made  int // registrations so far
}

type registration struct {
	start, end uintptr
	access     Access
}

func (d *fakeDevice) Register(addr uintptr, n int, access Access) (MR, error) {
	if d.onRegister != nil {
		if err := d.onRegister(n); err != nil {
			return MR{}, err
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.limit != 0 && d.bytes+int64(n) > d.limit {
		return MR{}, fmt.Errorf("fakeDevice: %w", syscall.ENOMEM)
	}
	if d.live == nil {
		d.live = make(map[uint32]registration)
	}
	d.next++
	d.made++
	d.bytes += int64(n)
	d.live[d.next] = registration{addr, addr + uintptr(n), access}
	return MR{LKey: d.next, RKey: d.next}, nil
}

func (d *fakeDevice) Deregister(mr MR) error {
	d.mu.Lock()
	r, ok := d.live[mr.LKey]
	d.mu.Unlock()
	if !ok {
		return fmt.Errorf("fakeDevice: key %d: %w", mr.LKey, syscall.EINVAL)
	}
	if d.onDeregister != nil {
		d.onDeregister(r)
	}
	if d.deregisterError != nil {
		return d.deregisterError
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.live, mr.LKey)
	d.bytes -= int64(r.end - r.start)
	return nil
}

func (d *fakeDevice) registrations() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.made
}

func (d *fakeDevice) registered() (entries int, bytes int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.live), d.bytes
}

// covers reports whether key stands for a live registration of b with access.
func (d *fakeDevice) covers(key uint32, b []byte, access Access) error {
	d.mu.Lock()
	r, ok := d.live[key]
	d.mu.Unlock()
	start := addressOf(b)
	switch {
	case !ok:
		return fmt.Errorf("key %d is not registered", key)
	case start < r.start || start+uintptr(len(b)) > r.end:
		return fmt.Errorf("[%#x, +%d) is not in [%#x, %#x)", start, len(b), r.start, r.end)
	case r.access&access != access:
		return fmt.Errorf("rights %v, want %v", r.access, access)
	}
	return nil
}
