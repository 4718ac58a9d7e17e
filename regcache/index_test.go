package regcache

import "testing"

// A region serves what is in it, up to the last byte, and nothing beyond.
func TestALookupFindsOnlyWhatCoversTheWholeRange(t *testing.T) {
	var x index
	r := &Region{start: 0x1000, end: 0x2000}
	x.insertLocked(r)
	for _, c := range []struct {
		start, end uintptr
		want       *Region
	}{{0x1000, 0x2000, r}, {0x1fff, 0x2000, r}, {0x1000, 0x2001, nil}, {0xfff, 0x2000, nil}, {0x2000, 0x2001, nil}} {
		if got := x.find(c.start, c.end); got != c.want {
			t.Errorf("[%#x, %#x): %v, want %v", c.start, c.end, got, c.want)
		}
	}
}
