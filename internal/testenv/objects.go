package testenv

import (
	"os/exec"
	"strconv"
	"strings"
	"testing"
)

// RDMAObjects counts the kernel's RDMA objects of all processes, by kind and device. Open
// devices are left out, because librdmacm keeps them.
func RDMAObjects(t testing.TB) map[string]int {
	t.Helper()
	out, err := exec.Command("rdma", "resource", "show").CombinedOutput()
	if err != nil {
		t.Fatalf("rdma resource show: %v\n%s", err, out)
	}
	counts := make(map[string]int)
	for _, line := range strings.Split(string(out), "\n") {
		_, line, _ = strings.Cut(line, ": ")
		dev, line, _ := strings.Cut(line, ":")
		f := strings.Fields(line)
		for i := 0; i+1 < len(f); i += 2 {
			if n, err := strconv.Atoi(f[i+1]); err == nil && f[i] != "ctx" {
				counts[f[i]+" of "+dev] = n
			}
		}
	}
	if len(counts) == 0 {
		t.Fatal("rdma resource show says nothing that is understood")
	}
	return counts
}
