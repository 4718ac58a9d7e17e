//go:build unix

package testenv

import (
	"syscall"
	"testing"

	"github.com/sanconn/san/internal/undernet"
)

// AsBuilt makes RawConn.Read behave in the test's process as in one that cmd/san has built, with
// SyscallRead in place of its syscall.Read.
func AsBuilt(t testing.TB) {
	was := undernet.Reads.Swap(true)
	t.Cleanup(func() { undernet.Reads.Store(was) })
}

// SyscallRead is syscall.Read as it is in programs that cmd/san has built: see cmd/san/syscall.go.txt.
func SyscallRead(fd int, p []byte) (n int, err error) {
	if len(p) == 0 || undernet.ReaderOf == nil {
		return syscall.Read(fd, p)
	}
	r := undernet.ReaderOf(fd)
	if r == nil {
		return syscall.Read(fd, p)
	}
	b, most, err := r.Next()
	if err != nil {
		return -1, err
	}
	if most > 0 {
		n, err = syscall.Read(fd, p[:min(uint64(len(p)), most)])
	} else {
		n = copy(p, b)
	}
	if err = r.Took(n, err); err != nil {
		n = -1
	}
	return n, err
}
