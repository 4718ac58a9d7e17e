//go:build linux

package hwsim

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/sanconn/san/internal/testenv"
)

// The simulated device detects programs that break a rule. testdata/rules.c breaks each rule once.
func TestRules(t *testing.T) {
	if testenv.Device() != "" {
		return // this is the lane of real drivers, which differ
	}
	program := compiled(t, "rules")
	settings := []string{"calm", "latency_ns=2000"}
	for seed := range 8 {
		settings = append(settings, fmt.Sprintf("seed=%d", seed))
	}
	for _, s := range settings {
		t.Run(s, func(t *testing.T) {
			New(t, s).run(t, program)
		})
	}
}

// In timed mode, no message comes before its time, and each that should come does. Operations that take
// time on a NIC or in the kernel take that time, or none if costs are switched off.
func TestTimed(t *testing.T) {
	if testenv.Device() != "" {
		return // this is the lane of real drivers
	}
	program := compiled(t, "timed")
	for _, tt := range []struct{ latency, bandwidth, moved, costs string }{
		{"2000", "50000000000", "1", "1"},
		{"2000", "50000000000", "0", "0"},
		{"500000", "1000000000", "1", "0"},
		{"500000", "1000000000", "0", "1"},
	} {
		s := fmt.Sprintf("latency_ns=%s,bandwidth=%s,costs=%s,bind_ns=1000000,wake_ns=1000000", tt.latency, tt.bandwidth, tt.costs)
		if tt.moved == "0" {
			s += ",no_copy"
		}
		t.Run(s, func(t *testing.T) {
			New(t, s).run(t, program, tt.latency, tt.bandwidth, tt.moved, tt.costs)
		})
	}
}

// compiled compiles a program of testdata.
func compiled(t *testing.T, name string) string {
	t.Helper()
	dir := Libraries(t)
	program := filepath.Join(t.TempDir(), name)
	cc := os.Getenv("CC")
	if cc == "" {
		cc = "cc"
	}
	build := exec.Command(cc, "-Wall", "-Werror", "-o", program, "testdata/"+name+".c", "-L"+dir, "-l:"+names[0])
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return program
}

// run runs a program on the fabric. The program prints what is wrong, and then fails.
func (f Fabric) run(t *testing.T, program string, args ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	run := exec.CommandContext(ctx, program, args...)
	run.Env = f.Programs()
	if out, err := run.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	f.Used(t)
}
