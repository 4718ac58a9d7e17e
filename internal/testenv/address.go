package testenv

import (
	"fmt"
	"math/rand/v2"
	"net"
	"testing"
)

// UnusedAddress returns an address of this host on which nobody listens now. Its port is below those
// that systems hand out to dials, so that no dial gets it before a server listens.
func UnusedAddress(t testing.TB) string {
	t.Helper()
	for range 100 {
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", 20_000+rand.IntN(10_000)))
		if err == nil {
			l.Close()
			return l.Addr().String()
		}
	}
	t.Fatal("no address is unused")
	return ""
}
