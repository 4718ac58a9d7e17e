package verbs

import (
	"testing"

	"github.com/sanconn/san/regcache"
)

// The first connections leave some memory for later ones. The test needs no device.
func TestAllocLeavesRoom(t *testing.T) {
	left := func() int { return int(regcache.DefaultArena().Left()) }
	var e Endpoint
	var all [][]byte
	before := left()
	for size := 4 << 20; size > freely; size /= 2 {
		for b := e.mem.Alloc(size); b != nil; b = e.mem.Alloc(size) {
			all = append(all, b)
			if left() < (arenaShare-1)*size {
				t.Fatalf("%d bytes of %d are left after buffer %d, of %d", left(), before, len(all), size)
			}
		}
	}
	if want := before >> 22; len(all) < want {
		t.Errorf("%d buffers of %d bytes, want %d", len(all), before, want)
	}
	for _, b := range all {
		e.mem.Free(b)
	}
	if left() != before {
		t.Errorf("%d bytes left, %d before", left(), before)
	}
}
