package shm

import (
	"os"
	"sync"

	"golang.org/x/sys/unix"

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

// punchHole frees the memory of a ring with nothing left to read, of a link that may
// (link.mayPunch). pages is how much of it may have memory, which its share has counted.
func punchHole(mem []byte, pages uint64, memory ring.Share) bool {
	err := unix.Madvise(mem, unix.MADV_REMOVE)
	if err == unix.EINVAL { // locked since it was mapped, by mlockall(MCL_CURRENT)
		_ = unix.Munlock(mem)
		err = unix.Madvise(mem, unix.MADV_REMOVE)
	}
	if err != nil {
		return false
	}
	memory.Return(pages)
	return true
}
