package regcache

import (
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// memoryLimit is how many bytes of memory this process may have: the host's, or less in a
// container (memory.max at the root of its control groups, version 2). 0: it is not known.
func memoryLimit() (bytes int64) {
	var s unix.Sysinfo_t
	if err := unix.Sysinfo(&s); err == nil {
		bytes = int64(s.Totalram) * int64(s.Unit)
	}
	if text, err := os.ReadFile("/sys/fs/cgroup/memory.max"); err == nil {
		if most, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64); err == nil {
			bytes = min(bytes, most)
		}
	}
	return bytes
}
