//go:build linux && cgo

package verbs

import (
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/regcache"
	"github.com/sanconn/san/session"
	"github.com/sanconn/san/test/hwsim"
)

// If a fork could detach memory from the device, memory of the heap is copied, at both ends. The arena's
// is used as on other hosts.
func TestHeapWhereForksShareIt(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return // only where hwsimRuns sets the simulated kernel to an old one
	}
	x, y, err := connect(listen(t, Config{}), Config{})
	if err != nil {
		t.Fatal(err)
	}
	a, b := negotiate(t, x, y, session.Config{})
	const size = 3 << 20
	rounds := func(from, into []byte) (direct uint64) {
		t.Helper()
		before := a.Stats().DirectBytesSent
		for range 3 { // the first goes through the send buffer
			rand.NewChaCha8([32]byte{1}).Read(from)
			carry(t, a, b, from, into)
		}
		return a.Stats().DirectBytesSent - before
	}
	heap := make([]byte, size)
	if n := rounds(heap, make([]byte, size)); n > 0 {
		t.Errorf("%d bytes left the heap directly", n)
	}
	if a.Stats().Unregistered == 0 {
		t.Error("no Write is counted")
	}
	buf, err := regcache.DefaultArena().Get(size)
	if err != nil {
		t.Fatal(err)
	}
	defer buf.Put()
	if n := rounds(buf.Bytes(), heap); n == 0 {
		t.Error("nothing left the arena directly")
	}
	testenv.Eventually(t, patience, func() error { // bytes that were fetched before the Read are copied
		rounds(buf.Bytes(), heap)
		if b.Stats().Unregistered == 0 {
			return errors.New("no Read into the heap is counted")
		}
		return nil
	})
}
