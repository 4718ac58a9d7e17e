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

// notOnHwsim are tests of package san that a device within one host cannot pass.
var notOnHwsim = strings.Join([]string{
	"RDMADroppedByAFirewall",    // the kernel's packet filter does not see its packets
	"RDMAMissingAtTheOtherEnd",  // there is no kernel's device to add
	"RDMAWithoutAListener",      // … nor its list of objects
	"RDMARefusedAsTCPIs",        // … nor its ports
	"MemlockExhausted",          // … nor its account of pinned memory
	"ListenerOutOfDescriptors$", // where shm cannot, verbs carries the connection
}, "|")

// TestSuiteOfPackageSAN runs package san's own tests, whose lanes are those of verbs here.
func TestSuiteOfPackageSAN(t *testing.T) {
	if testenv.Device() != "" {
		return // such a process, or the lane of real drivers
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
	f.Check(t) // also that they used it
}
