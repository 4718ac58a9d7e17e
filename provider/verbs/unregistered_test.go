//go:build linux && cgo

package verbs

import (
	"errors"
	"math/rand/v2"
	"syscall"
	"testing"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/session"
	"github.com/sanconn/san/test/hwsim"
)

// A large Write from memory that is not Go's, and a Read into such memory, are copied and counted. Those
// of the same size on the heap are neither.
func TestUnregisteredMemoryIsCounted(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return // elsewhere there may be no windows: see hwsimRuns
	}
	const size = 3 << 20
	mapped, err := syscall.Mmap(-1, 0, size, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Munmap(mapped)
	l := listen(t, Config{})
	l.windows = true
	x, y, err := connect(l, Config{})
	if err != nil {
		t.Fatal(err)
	}
	a, b := negotiate(t, x, y, session.Config{})
	move := func(from, into []byte) {
		t.Helper()
		rand.NewChaCha8([32]byte{1}).Read(from)
		carry(t, a, b, from, into)
	}
	expect := func(what string, writes bool, reads bool) {
		t.Helper()
		if n, m := a.Stats().Unregistered, b.Stats().Unregistered; n > 0 != writes || m > 0 != reads {
			t.Errorf("%s: %d Writes are counted, and %d Reads", what, n, m)
		}
	}
	from, into := make([]byte, size), make([]byte, size)
	for range 3 { // the first goes through the send buffer
		move(from, into)
	}
	expect("from heap to heap", false, false)
	if a.Stats().DirectBytesSent == 0 {
		t.Error("nothing went from where it was")
	}
	testenv.Eventually(t, patience, func() error { // bytes that were fetched before the Read are copied
		move(from, mapped)
		if b.Stats().Unregistered == 0 {
			return errors.New("no Read is counted")
		}
		return nil
	})
	expect("into mapped memory", false, true)
	move(mapped, into)
	expect("from mapped memory", true, true)
	if n := a.Stats().Unregistered; n != 1 {
		t.Errorf("%d Writes are counted, of one", n)
	}
}
