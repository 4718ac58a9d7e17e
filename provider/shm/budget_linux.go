package shm

import (
	"sync"

	"github.com/sanconn/san/provider/shm/internal/ring"
	"github.com/sanconn/san/regcache"
)

// budget is for all rings that this process writes.
var budget = sync.OnceValue(func() *ring.Budget { return ring.NewBudget(budgetFor(regcache.MemoryLimit())) })

const (
	defaultBudget = 256 << 20

	// budgetPart: rings may take this part of the process's memory. A process beyond its limit is
	// killed, and it needs memory for other things. Rings may take as much again while they grow to
	// ring.Sure.
	budgetPart = 8
)

// budgetFor returns the budget of a process whose memory is limited to limit bytes.
func budgetFor(limit int64) int64 { return min(defaultBudget, limit/budgetPart) }
