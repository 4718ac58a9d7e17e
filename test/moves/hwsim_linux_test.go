//go:build cgo

package moves

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"testing"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/test/hwsim"
)

// TestOnHwsim runs the tests of this package between two processes that have the simulated device, and
// use no other provider.
func TestOnHwsim(t *testing.T) {
	if testenv.Device() != "" {
		return // this is such a process, or the lane of real drivers
	}
	f := hwsim.New(t, "seed=51,jitter_us=8")
	child := exec.Command(os.Args[0], "-test.run=^(TestMoves|TestKills|TestKillsOnTheWayBack|TestStops)$", "-test.timeout=5m",
		"-test.v", fmt.Sprintf("-moves.runs=%d", (*runs+2)/3), fmt.Sprintf("-moves.seed=%d", *first))
	child.Env = append(f.Env(), "SAN_PROVIDERS=verbs")
	out, err := child.CombinedOutput()
	if n := bytes.Count(out, []byte("\n--- PASS")); err != nil || n != 4 {
		t.Errorf("%d of 4 tests pass: %v\n%s", n, err, out)
	}
	f.Check(t)
}
