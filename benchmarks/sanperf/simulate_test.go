//go:build linux && cgo

package main

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sanconn/san/test/hwsim"
)

// One command shows on any machine which way bytes go over RDMA. Its output must tell that there was no
// device.
func TestSimulate(t *testing.T) {
	hwsim.Libraries(t)
	// A buffer's Writes are copied until the copies have cost as much as registering the buffer: once,
	// or up to eight times if a busy machine measures costs so (provider/verbs/costs.go). The number
	// depends on the machine.
	const enough = 10 * 16 << 20
	const some = 64 << 20
	for _, test := range []struct {
		profile string
		own     bool // large Writes go from the program's memory
	}{{"mlx5-roce", true}, {"irdma-iwarp", false}} {
		t.Run(test.profile, func(t *testing.T) {
			var c comparison
			var went map[string]ways
			for length := 50 * time.Millisecond; length < time.Minute; length *= 2 {
				c, went = comparison{}, make(map[string]ways)
				decode(t, mustRun(t, "-simulate", test.profile, "-rounds", "1", "-time", length.String(), "-warmup", "50ms", "-json"), &c)
				for _, row := range c.Ways {
					went[row.Name] = row.ways
				}
				// Until the peer has sent its inbox, bytes go as messages.
				if w := went["sending, 16 MiB"]; went["sending, 64 KiB"].sum() >= some && w.sum() >= some && (!test.own || w.OwnMemory > 0 || w.sum() >= enough) {
					break
				}
			}
			if !strings.Contains(c.Simulated, "profile="+test.profile) {
				t.Errorf("simulated: %q", c.Simulated)
			}
			for i, row := range tableFigures(workloads) {
				if by := c.Rows[i].Cells[2].Providers; !row.of.mode.short() && !slices.Equal(by, []string{"verbs"}) {
					t.Errorf("%s: went by %v", row.name, by)
				}
			}
			for _, row := range c.Ways {
				if row.TCP > 0 {
					t.Errorf("%s: %+v", row.Name, row.ways)
				}
			}
			if w := went["round trips, 64 B"]; w.Messages != w.sum() {
				t.Errorf("round trips: %+v", w)
			}
			if w := went["sending, 64 KiB"]; w.Box < w.sum()/2 || w.Hits == 0 {
				t.Errorf("64 KiB: %+v", w)
			}
			if w := went["sending, 16 MiB"]; test.own && (w.OwnMemory == 0 || w.Windows == 0 || w.Registrations == 0) {
				t.Errorf("16 MiB: %+v", w)
			} else if !test.own && (w.OwnMemory > 0 || w.Box < w.sum()/2) {
				t.Errorf("16 MiB: %+v", w)
			}
		})
	}
}

// The first lines of the table must tell that it is of no real device.
func TestSimulatedTableSaysSo(t *testing.T) {
	hwsim.Libraries(t)
	out := mustRun(t, "-simulate", "bnxt_re", "-rounds", "1", "-time", "1ms", "-warmup", "1ms")
	if !strings.HasPrefix(out, "SIMULATED: there is no RDMA device") || !strings.Contains(out, "how bytes went: own memory") {
		t.Errorf("%s", out)
	}
}

func TestSimulateWithoutACompiler(t *testing.T) {
	t.Setenv("CC", "/nonexistent/cc")
	code, stdout, stderr := sanperf(t, "-simulate", "mlx5-roce")
	if code != exitFailed || stdout != "" || !strings.Contains(stderr, "apt install gcc") {
		t.Errorf("exit code %d: %s%s", code, stdout, stderr)
	}
}
