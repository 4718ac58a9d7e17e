//go:build linux && cgo

package hwsim_test

import (
	"bytes"
	"flag"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/test/hwsim"
)

var suite = flag.String("hwsim.suite", "TwoProcessesStream|LanesMoveBytes|HalfClose|CopyOf|ListenerRequire|HTTPConcurrent",
	"run those of package san's own tests on the device that match this `expression`; . for all, which takes minutes")

// notOnHwsim are tests of package san that cannot pass on a device within one host.
var notOnHwsim = strings.Join([]string{
	"RDMADroppedByAFirewall",    // the kernel's packet filter does not see the device's packets
	"RDMAMissingAtTheOtherEnd",  // there is no device of the kernel to add
	"RDMAWithoutAListener",      // nor the kernel's list of objects
	"RDMARefusedAsTCPIs",        // nor the kernel's ports
	"MemlockExhausted",          // nor the kernel's count of pinned memory
	"ListenerOutOfDescriptors$", // verbs carries the connection where shm cannot
}, "|")

// TestSuiteOfPackageSAN runs package san's own tests. There their lanes are those of verbs.
func TestSuiteOfPackageSAN(t *testing.T) {
	if testenv.Device() != "" {
		return // this is such a process, or the lane of real drivers
	}
	bin := filepath.Join(t.TempDir(), "san.test")
	if out, err := exec.Command("go", "test", "-c", "-o", bin, "../..").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	f := hwsim.New(t, "seed=51,jitter_us=8")
	tests := exec.Command(bin, "-test.short", "-test.v", "-test.timeout=8m", "-test.run="+*suite, "-test.skip=^Test("+notOnHwsim+")")
	tests.Dir = "../.."
	tests.Env = f.Env()
	out, err := tests.CombinedOutput()
	if err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	if !bytes.Contains(out, []byte("--- PASS")) {
		t.Errorf("no test of that name\n%s", out)
	}
	f.Check(t) // also checks that the tests have used the fabric
}
