package interop

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"math/rand/v2"
	"net"
	"testing"
	"time"

	"github.com/sanconn/san/internal/testenv"
)

// amount returns how many bytes to move: fewer in the guest, which is emulated.
func amount(n int) int {
	if testenv.Device() != "" {
		return max(1, n/16)
	}
	return n
}

// randomBytes returns n bytes, which differ each time.
func randomBytes(n int) []byte {
	b := make([]byte, n)
	var seed [32]byte
	for i := 0; i < len(seed); i += 8 {
		v := rand.Uint64()
		for j := range 8 {
			seed[i+j] = byte(v >> (8 * j))
		}
	}
	rand.NewChaCha8(seed).Read(b)
	return b
}

// checksum is sent back, so that the sender can compare what has arrived.
func checksum(b []byte) string { return fmt.Sprintf("%x", sha256.Sum256(b)) }

// wantBytes checks that the same bytes have come back.
func wantBytes(t *testing.T, got, want []byte) {
	t.Helper()
	if !bytes.Equal(got, want) {
		t.Errorf("%d bytes, checksum %s; want %d, %s", len(got), checksum(got), len(want), checksum(want))
	}
}

// mustDial dials, for clients that take a connection. The connection is closed when the test ends.
func mustDial(t *testing.T, dial dialFunc, address string) net.Conn {
	t.Helper()
	ctx := t.Context()
	conn, err := dial(ctx, "tcp", address)
	if err != nil {
		panic(err) // not t.Fatal, as goroutines that a test has started call this, too
	}
	t.Cleanup(func() { conn.Close() })
	conn.SetDeadline(time.Now().Add(patience))
	return conn
}

// must is for calls that cannot fail in a test.
func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}
