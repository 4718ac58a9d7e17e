package san

import (
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func countDescriptors(t testing.TB) int {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(fds)
}

// countMappings counts mappings of shared memory.
func countMappings(t testing.TB) int {
	t.Helper()
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(string(maps), "/memfd:")
}

// holdDescriptors starts a child that holds all descriptors of this process, as a careless fork would
// leave it, and returns its pid.
func holdDescriptors() int {
	fds, _ := os.ReadDir("/proc/self/fd")
	for _, fd := range fds {
		if n, err := strconv.Atoi(fd.Name()); err == nil && n > 2 {
			unix.FcntlInt(uintptr(n), unix.F_SETFD, 0)
		}
	}
	holder := exec.Command("sleep", "60")
	if holder.Start() != nil {
		return 0
	}
	return holder.Process.Pid
}
