package shm

import (
	"sync"

	"github.com/sanconn/san/provider/shm/internal/ring"
	"github.com/sanconn/san/regcache"
)

// budget is of all rings that this process writes.
var budget = sync.OnceValue(func() *ring.Budget { return ring.NewBudget(budgetFor(regcache.MemoryLimit())) })

const (
	defaultBudget = 256 << 20

	// budgetPart is the part of the process's memory that rings may take: a process that is
	// beyond its limit is killed, and it has other uses for its memory. Rings may take as much
	// again on their way to ring.Sure.
	budgetPart = 8
)

// budgetFor is the budget of a process that may have so much memory.
func budgetFor(limit int64) int64 { return min(defaultBudget, limit/budgetPart) }
