//go:build linux && cgo

package ibv

import (
	"errors"
	"strings"
	"syscall"
	"testing"
)

func TestMemoryThatIsNotMappedIsNotRegistered(t *testing.T) {
	s := onSite(t)
	ctx := must(Open(s.devices[0]))(t)
	atEnd(t, "device", ctx)
	pd := must(ctx.AllocPD())(t)
	atEnd(t, "PD", pd)
	for _, c := range []struct {
		what   string
		addr   uintptr
		length int
		errno  syscall.Errno
	}{
		{"unmapped", 4096, 4096, syscall.EFAULT},
		{"of no length", addrOf(make([]byte, 8)), 0, syscall.EINVAL},
		{"of negative length", addrOf(make([]byte, 8)), -1, syscall.EINVAL},
	} {
		mr, err := pd.RegMR(c.addr, c.length, LocalWrite)
		var e *Error
		if mr != nil || !errors.Is(err, c.errno) || !errors.As(err, &e) || e.Verb != "ibv_reg_mr" || !strings.Contains(err.Error(), s.devices[0]) {
			t.Errorf("memory %s: %v, %v, want %v", c.what, mr, err, c.errno)
		}
	}
}
