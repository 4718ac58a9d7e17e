package regcache

import (
	"fmt"
	"sync"
	"syscall"
)

// book is a device that only keeps a record of its registrations.
type book struct {
	limit  int64                // bytes in all; 0: any
	refuse func(n int) error    // when set: asked before each registration
	onDrop func(r registration) // when set: called before each deregistration
	keep   error                // when set: what each deregistration fails with

	mu    sync.Mutex
	live  map[uint32]registration
	bytes int64
	next  uint32
	made  int
}

type registration struct {
	start, end uintptr
	access     Access
}

func (d *book) Register(addr uintptr, n int, access Access) (MR, error) {
	if d.refuse != nil {
		if err := d.refuse(n); err != nil {
			return MR{}, err
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.limit != 0 && d.bytes+int64(n) > d.limit {
		return MR{}, fmt.Errorf("book: %w", syscall.ENOMEM)
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

func (d *book) Deregister(mr MR) error {
	d.mu.Lock()
	r, ok := d.live[mr.LKey]
	d.mu.Unlock()
	if !ok {
		return fmt.Errorf("book: key %d: %w", mr.LKey, syscall.EINVAL)
	}
	if d.onDrop != nil {
		d.onDrop(r)
	}
	if d.keep != nil {
		return d.keep
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.live, mr.LKey)
	d.bytes -= int64(r.end - r.start)
	return nil
}

func (d *book) registrations() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.made
}

func (d *book) registered() (entries int, bytes int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.live), d.bytes
}

// covers reports whether key stands for a live registration of b with access.
func (d *book) covers(key uint32, b []byte, access Access) error {
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
