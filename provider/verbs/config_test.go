package verbs

import (
	"testing"
)

// Each port on which a program may listen has a different port on iWARP.
func TestIWARPPorts(t *testing.T) {
	cfg := Config{}.withDefaults()
	seen := make(map[uint16]uint16)
	for p := 1024; p < 1<<16; p++ {
		q := cfg.iwarpPort(uint16(p))
		if q < 1024 || q == uint16(p) {
			t.Fatalf("port %d has %d", p, q)
		}
		if other, taken := seen[q]; taken {
			t.Fatalf("ports %d and %d both have %d", p, other, q)
		}
		seen[q] = uint16(p)
	}
	if q := cfg.iwarpPort(80); q != 10080 {
		t.Errorf("port 80 has %d", q)
	}
	if q := (Config{IWARPOffset: -1}).withDefaults().iwarpPort(80); q != 0 {
		t.Errorf("switched off, port 80 has %d", q)
	}
}
