package testenv

import (
	"time"

	"github.com/sanconn/san/internal/memspeed"
)

// SlowCopies has package verbs take this host for one that copies at 10 GB/s, as most do of memory that
// no cache holds. Then Writes are offered from 1 MiB on, on each machine and at any load.
func SlowCopies() { copiesTake(100 * time.Microsecond) }

// FastCopies has it take this host for one that copies at 100 GB/s.
func FastCopies() { copiesTake(10 * time.Microsecond) }

func copiesTake(d time.Duration) { memspeed.Copying = func() time.Duration { return d } } // for 1 MiB
