// Package testenv has what tests may expect of the machine on which they run. Only tests import it. A
// test may skip only what cannot work here. If SAN_TEST_REQUIRE is set, as by .ci/run, something that
// is merely missing is a failure.
package testenv

import (
	"os"
	"strings"
	"testing"
)

// Device is the RDMA device on which the lane (test/guest) runs the tests: "rxe" or "siw", or "" if
// there is none. With a device, nothing may be missing.
func Device() string { return os.Getenv("SAN_TEST_RDMA") }

// NeedDevice is for tests of RDMA: it returns Device, and skips the test if there is none. If the
// machine has a guest's device but Device is not set, the lane has a mistake, and no such test would
// ever run: see Missing.
func NeedDevice(t testing.TB) string {
	t.Helper()
	d := Device()
	if d == "" {
		for _, name := range devices() {
			if strings.HasPrefix(name, "rxe") || strings.HasPrefix(name, "siw") {
				Missing(t, "SAN_TEST_RDMA does not say which device to test; there is "+name)
			}
		}
		t.Skip("runs on RDMA devices only: test/guest/run test PACKAGE")
	}
	return d
}

// NeedNoDevice is for tests without RDMA. It skips them in lanes that have a device on purpose.
func NeedNoDevice(t testing.TB) {
	t.Helper()
	if Device() != "" {
		t.Skip("this is the lane with devices")
	}
	if d := devices(); len(d) > 0 {
		Missing(t, "a machine without RDMA devices (there is "+d[0]+")")
	}
}

// NeedSiege is for tests in which one user attacks another (test/siege). They run in a lane of
// their own, because they need root and measure.
func NeedSiege(t testing.TB) {
	t.Helper()
	if os.Getenv("SAN_TEST_SIEGE") == "" {
		t.Skip("runs alone, as root: .ci/run siege")
	}
	NeedRoot(t)
}

// NeedRoot is for tests that start processes of other users, or make network interfaces.
func NeedRoot(t testing.TB) {
	t.Helper()
	if os.Getuid() != 0 {
		Missing(t, "root")
	}
}

// Missing ends a test for which the machine lacks something. It fails the test if nothing
// may be missing, and skips it otherwise.
func Missing(t testing.TB, what string) {
	t.Helper()
	if Device() != "" || os.Getenv("SAN_TEST_REQUIRE") != "" {
		t.Fatalf("missing here, where every test has to run: %s", what)
	}
	t.Skipf("missing: %s", what)
}

// MissingKernel is Missing for something that the kernel must have. The guest has another kernel; what
// that kernel lacks is tested on the host.
func MissingKernel(t testing.TB, what string) {
	t.Helper()
	if Device() != "" {
		t.Skipf("missing in the guest's kernel: %s", what)
	}
	Missing(t, what)
}

// devices returns the kernel's RDMA devices, whether or not there are libraries for them.
func devices() (names []string) {
	entries, _ := os.ReadDir("/sys/class/infiniband")
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}
