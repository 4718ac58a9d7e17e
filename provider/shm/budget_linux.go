package shm

import (
	"io/fs"
	"math"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/sanconn/san/provider/shm/internal/ring"
)

// budget is of all rings that this process writes.
var budget = sync.OnceValue(func() *ring.Budget { return ring.NewBudget(budgetFor(memoryLimit(os.DirFS("/")))) })

const (
	defaultBudget = 256 << 20

	// budgetPart is the part of the container's memory that rings may take: a process that is
	// beyond its limit is killed, and it has other uses for its memory. Rings may take as much
	// again on their way to ring.Sure.
	budgetPart = 8
)

// budgetFor is the budget of a process whose container has so much memory.
func budgetFor(limit uint64) int64 { return int64(min(defaultBudget, limit/budgetPart)) }

// memoryLimit is how much memory this process's control group may have, of version 1 or 2; the
// largest number if there is no limit. root is the file system's. A container may see the path
// of its group as the host does, or as its own root, and be limited by any group above: so each
// ancestor is looked at that there is.
func memoryLimit(root fs.FS) uint64 {
	limit := uint64(math.MaxUint64)
	groups, err := fs.ReadFile(root, "proc/self/cgroup")
	if err != nil {
		return limit
	}
	for line := range strings.Lines(string(groups)) { // hierarchy:controllers:path
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(parts) != 3 {
			continue
		}
		mount, file := "", ""
		switch {
		case parts[0] == "0" && parts[1] == "":
			mount, file = "sys/fs/cgroup", "memory.max"
		case slices.Contains(strings.Split(parts[1], ","), "memory"):
			mount, file = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
		default:
			continue
		}
		for group := path.Join("/", parts[2]); ; group = path.Dir(group) {
			if text, err := fs.ReadFile(root, path.Join(mount, group, file)); err == nil {
				if n, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64); err == nil { // or "max"
					limit = min(limit, n)
				}
			}
			if group == "/" {
				break
			}
		}
	}
	return limit
}
