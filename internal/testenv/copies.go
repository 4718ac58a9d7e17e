package testenv

import (
	"time"

	"github.com/sanconn/san/internal/memspeed"
)

// SlowCopies has package verbs take this host for one that copies at 10 GB/s, as most do of memory that
// no cache holds. Then Writes are offered from 1 MiB on, on each machine and at any load.
func SlowCopies() {
	memspeed.Copying = func() time.Duration { return 100 * time.Microsecond } // of 1 MiB
}
