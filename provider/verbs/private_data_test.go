package verbs

import (
	"bytes"
	"errors"
	"testing"

	"github.com/sanconn/san/session"
)

// Decoding any private data of a peer does not panic. Data that was decoded is encoded to the same
// bytes. A reject becomes an error that Dial may return.
func FuzzPrivateData(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte) {
		p, ours := parsePrivateData(b)
		if !ours {
			return
		}
		if again := p.bytes(); !bytes.Equal(again[:8], b[:8]) {
			t.Fatalf("% x became % x", b, again)
		}
		if err := p.err(); !errors.As(err, new(*session.Unavailable)) {
			t.Fatalf("the error of % x is %v", b, err)
		}
	})
}
