//go:build cgo

package interop

import (
	"bytes"
	"os"
	"os/exec"
	"testing"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/test/hwsim"
)

// TestProgramsOnTheSimulatedDevice runs all programs over verbs on any machine, on devices of
// test/hwsim: between two processes, and within one process on a device whose peer does not read by
// RDMA.
func TestProgramsOnTheSimulatedDevice(t *testing.T) {
	if testenv.Device() != "" {
		return // this is the lane of real drivers, or such a process
	}
	for way, settings := range map[string]string{
		overVerbsApart: "seed=61",
		"verbs":        "seed=62,profile=irdma-iwarp",
	} {
		t.Run(way, func(t *testing.T) {
			f := hwsim.New(t, settings)
			child := exec.Command(os.Args[0], "-test.run=^TestPrograms$", "-test.v", "-test.timeout=10m")
			child.Env = append(f.Env(), wayVar+"="+way)
			out, err := child.CombinedOutput()
			if err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			if n := bytes.Count(out, []byte("        --- PASS")); n != len(programs) {
				t.Errorf("%d of %d have run\n%s", n, len(programs), out)
			}
			f.Check(t)
			if w, err := f.Work(); err != nil || w.Sends < int64(len(programs)) {
				t.Errorf("the device has sent %d messages, %v", w.Sends, err)
			}
		})
	}
}
