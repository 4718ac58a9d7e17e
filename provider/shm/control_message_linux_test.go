package shm

import (
	"bytes"
	"testing"
)

// Whatever comes, decoding does not panic; and what was understood is encoded to a message
// that is understood as the same.
func FuzzMessage(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte) {
		var first, second message
		if first.decode(b) != nil {
			return
		}
		again := first.encode()
		if err := second.decode(again); err != nil || second != first {
			t.Fatalf("% x is %+v, and that % x, which is %+v, %v", b, first, again, second, err)
		}
		if !bytes.Equal(again, b) {
			t.Fatalf("% x became % x", b, again)
		}
	})
}
