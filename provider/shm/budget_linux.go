package shm

import (
	"golang.org/x/sys/unix"

	"github.com/sanconn/san/provider/shm/internal/ring"
)

// budget is shared by all rings that this process writes.
var budget = ring.NewBudget(defaultBudget)

const defaultBudget = 256 << 20

// giveBack frees the memory of a ring with nothing left to read, of a link that may
// (link.givesBack). pages is how much of it may have memory, which the budget has counted.
func giveBack(mem []byte, pages uint64) bool {
	if unix.Madvise(mem, unix.MADV_REMOVE) != nil {
		return false
	}
	budget.Return(pages)
	return true
}
