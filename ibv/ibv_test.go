package ibv

import (
	"errors"
	"strings"
	"syscall"
	"testing"

	"github.com/sanconn/san/internal/testenv"
)

func TestAnErrorHasVerbObjectAndErrno(t *testing.T) {
	err := verbError("ibv_reg_mr", "4096 bytes on rxe0", int(syscall.ENOMEM))
	if !errors.Is(err, syscall.ENOMEM) {
		t.Errorf("errors.Is does not find ENOMEM in %v", err)
	}
	for _, part := range []string{"ibv_reg_mr", "4096 bytes on rxe0", "RLIMIT_MEMLOCK"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%q does not say %q", err, part)
		}
	}
	if verbError("ibv_reg_mr", "", 0) != nil {
		t.Error("errno 0 is an error")
	}
}

// On a machine without RDMA each entry point fails with one clear error.
func TestWithoutDevicesEachWayInFails(t *testing.T) {
	testenv.NeedNoDevice(t)
	unavailable := Available()
	if unavailable != nil && !errors.Is(unavailable, ErrNotAvailable) {
		t.Fatalf("Available: %v, which does not wrap ErrNotAvailable", unavailable)
	}
	devices, err := Devices()
	if len(devices) > 0 {
		t.Fatalf("devices that the kernel does not have: %v", devices)
	}
	wants := func(what string, err, available error) {
		t.Helper()
		want := available
		if unavailable != nil {
			want = ErrNotAvailable
		}
		if !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", what, err, want)
		}
	}
	wants("Devices", err, nil)
	_, err = Open("rxe0")
	wants("Open", err, syscall.ENODEV)
	ch, err := NewEventChannel()
	if ch != nil {
		ch.Close() // the kernel has rdma_ucm even without a device
	} else {
		wants("NewEventChannel", err, syscall.ENODEV)
	}
}

func TestValuesHaveNames(t *testing.T) {
	for _, c := range []struct{ got, want string }{
		{Success.String(), "success"},
		{Status(77).String(), "status 77"},
		{RNRRetryExcErr.Error(), "work completion: receiver-not-ready retries exceeded"},
		{GIDTypeRoCEv2.String(), "RoCE v2"},
		{Rejected.String(), "rejected"},
		{EventPortErr.String(), "port error"},
		{QPRTS.String(), "RTS"},
		{GID{10: 0xff, 0xff, 10, 8, 0, 1}.Addr().String(), "10.8.0.1"},
	} {
		if c.got != c.want {
			t.Errorf("%q, want %q", c.got, c.want)
		}
	}
	if got := MTU(5).Bytes(); got != 4096 {
		t.Errorf("MTU 5 is %d bytes", got)
	}
}
