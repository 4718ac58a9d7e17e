//go:build linux && cgo

package ibv

import (
	"bytes"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/test/hwsim"
)

// notOnHwsim are tests that add a device, or in which the kernel decides by a mapping or a route.
var notOnHwsim = []string{"TestAPortReportsItsLink", "TestARemovedDeviceIsReported",
	"TestMemoryThatIsNotMappedIsNotRegistered", "TestAnAddressWithoutRouteIsNotResolved"}

// TestOnHwsim runs the tests of the device lanes on the simulated device, in a process that finds its
// libraries in place of the system's.
func TestOnHwsim(t *testing.T) {
	if testenv.Device() != "" {
		return // this is such a process, or the lane of real drivers
	}
	f := hwsim.New(t, "seed=1")
	child := exec.Command(os.Args[0], "-test.timeout=2m", "-test.v", "-test.skip="+strings.Join(notOnHwsim, "|"))
	child.Env = f.Env()
	out, err := child.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if !bytes.Contains(out, []byte("--- PASS: TestASendFillsAReceive")) {
		t.Errorf("no test ran\n%s", out)
	}
	f.Check(t)
}
