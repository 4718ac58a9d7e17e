package regcache

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"
)

// Bits of an entry of /proc/self/pagemap
// (Documentation/admin-guide/mm/pagemap.rst).
const (
	pagemapPresent   = 1 << 63
	pagemapFrameMask = 1<<55 - 1
)

var pagemap = sync.OnceValues(func() (*os.File, error) { return os.Open("/proc/self/pagemap") })

// canVerify returns an error if physical frames cannot be seen. Without CAP_SYS_ADMIN the
// kernel shows all frames as 0.
func canVerify() error {
	if _, err := pagemap(); err != nil {
		return err
	}
	probe := make([]byte, pageSize)
	probe[0] = 1
	if framesOf(addressOf(probe), 1)[0] == 0 {
		return errors.New("physical frames are hidden: CAP_SYS_ADMIN is needed")
	}
	return nil
}

// framesOf returns the physical frame of each page of [start, start+n), 0 for one that is
// not present. canVerify must have succeeded.
func framesOf(start uintptr, n int) []uint64 {
	file, _ := pagemap()
	first := start / pageSize
	pages := (start+uintptr(n)-1)/pageSize - first + 1
	raw := make([]byte, pages*8)
	if _, err := file.ReadAt(raw, int64(first*8)); err != nil && !errors.Is(err, syscall.EINTR) {
		panic(fmt.Sprintf("regcache: verify: read pagemap: %v", err))
	}
	frames := make([]uint64, pages)
	for i := range frames {
		if entry := binary.NativeEndian.Uint64(raw[i*8:]); entry&pagemapPresent != 0 {
			frames[i] = entry & pagemapFrameMask
		}
	}
	return frames
}

// verify panics unless [start, start+n), a part of r, has the frames that it had when r was
// registered. The caller holds r; before a panic that hold is released.
func (r *Region) verify(start uintptr, n int) {
	skip := start/pageSize - r.start/pageSize
	for i, frame := range framesOf(start, n) {
		if was := r.frames[int(skip)+i]; frame != was {
			r.Release() // so that a program that recovers can close the cache
			panic(fmt.Sprintf("regcache: stale registration: page %#x has frame %#x, but %#x was registered",
				(start/pageSize+uintptr(i))*pageSize, frame, was))
		}
	}
}
