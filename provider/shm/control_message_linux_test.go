package shm

import (
	"bytes"
	"encoding/binary"
	"slices"
	"testing"
)

// A process with another byte order would misread the words in shared memory, so its messages have
// another magic.
func TestMessageOfAnotherByteOrder(t *testing.T) {
	b := (&message{kind: msgLink, version: version}).encode()
	if got := binary.NativeEndian.Uint32(b); got != magic || new(message).decode(b) != nil {
		t.Errorf("the magic is %#x", got)
	}
	slices.Reverse(b[:4])
	if err := new(message).decode(b); err != errMessage {
		t.Error(err)
	}
}

// Decoding any bytes does not panic, and a message that was decoded is encoded to one that decodes to
// the same.
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
