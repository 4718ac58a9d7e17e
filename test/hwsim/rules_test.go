//go:build linux

package hwsim

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/sanconn/san/internal/testenv"
)

// Whoever breaks a rule is found out: testdata/rules.c breaks each of them once.
func TestRules(t *testing.T) {
	if testenv.Device() != "" {
		return // the lane of real drivers, which differ
	}
	dir := Libraries(t)
	program := filepath.Join(t.TempDir(), "rules")
	cc := os.Getenv("CC")
	if cc == "" {
		cc = "cc"
	}
	build := exec.Command(cc, "-Wall", "-Werror", "-o", program, "testdata/rules.c", "-L"+dir, "-l:"+names[0])
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	settings := []string{"calm"}
	for seed := range 8 {
		settings = append(settings, fmt.Sprintf("seed=%d", seed))
	}
	for _, s := range settings {
		t.Run(s, func(t *testing.T) {
			f := New(t, s)
			run := exec.Command(program)
			run.Env = f.Programs()
			if out, err := run.CombinedOutput(); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
			f.Used(t)
		})
	}
}
