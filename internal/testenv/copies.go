package testenv

import (
	"time"

	"github.com/sanconn/san/internal/memspeed"
)

// SlowCopies has package verbs take this host for one that copies at 10 GB/s, as most do of memory that
// no cache holds. Then Writes are offered from 1 MiB on, on each machine and at any load.
func SlowCopies() { Copies(100 * time.Microsecond) }

// Copies has it take this host for one that takes so long to copy memspeed.Bytes.
func Copies(d time.Duration) { memspeed.Copying = func() time.Duration { return d } }
