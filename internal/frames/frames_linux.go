package frames

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"unsafe"
)

// Bits of an entry of /proc/self/pagemap
// (Documentation/admin-guide/mm/pagemap.rst).
const (
	pagemapPresent   = 1 << 63
	pagemapFrameMask = 1<<55 - 1
	pagemapEntrySize = 8
)

var pageSize = uintptr(os.Getpagesize())

var pagemap = sync.OnceValues(func() (*os.File, error) { return os.Open("/proc/self/pagemap") })

// Visible returns an error if physical frames cannot be seen. Without CAP_SYS_ADMIN the
// kernel shows all frames as 0.
func Visible() error {
	if _, err := pagemap(); err != nil {
		return err
	}
	probe := make([]byte, pageSize)
	probe[0] = 1
	if Of(uintptr(unsafe.Pointer(unsafe.SliceData(probe))), 1).frames[0] == 0 {
		return errors.New("physical frames are hidden: CAP_SYS_ADMIN is needed")
	}
	return nil
}

// A Record holds the physical frames that a range of addresses had at some time.
type Record struct {
	start, end uintptr
	frames     []uint64 // one for each page; 0 for a page that was not present
}

// Of records the frames of [start, start+n). Visible must have succeeded.
func Of(start uintptr, n int) Record {
	file, _ := pagemap()
	first := start / pageSize
	pages := (start+uintptr(n)-1)/pageSize - first + 1
	raw := make([]byte, pages*pagemapEntrySize)
	if _, err := file.ReadAt(raw, int64(first*pagemapEntrySize)); err != nil {
		panic(fmt.Sprintf("frames: read pagemap: %v", err))
	}
	frames := make([]uint64, pages)
	for i := range frames {
		if entry := binary.NativeEndian.Uint64(raw[i*pagemapEntrySize:]); entry&pagemapPresent != 0 {
			frames[i] = entry & pagemapFrameMask
		}
	}
	return Record{start: start, end: start + uintptr(n), frames: frames}
}

// Compare returns an error unless [start, start+n) lies in the range and its pages still
// have the recorded frames.
func (r Record) Compare(start uintptr, n int) error {
	if start < r.start || start+uintptr(n) > r.end {
		return fmt.Errorf("[%#x, +%d) is not in [%#x, %#x)", start, n, r.start, r.end)
	}
	skip := int(start/pageSize - r.start/pageSize)
	for i, frame := range Of(start, n).frames {
		if was := r.frames[skip+i]; frame != was {
			return fmt.Errorf("page %d of [%#x, +%d) has frame %#x, was %#x", i, start, n, frame, was)
		}
	}
	return nil
}
