package testenv

import (
	"time"

	"github.com/sanconn/san/internal/memspeed"
)

// SlowCopies has package verbs take this host for one that copies at 1 GB/s. Then Writes are offered
// from 1 MiB on, and registering that with the simulated device costs one copy, on each machine and at
// most loads: it takes 60 to 90 µs where nobody else is busy.
func SlowCopies() { copiesTake(time.Millisecond) }

// FastCopies has it take this host for one that copies at 100 GB/s.
func FastCopies() { copiesTake(10 * time.Microsecond) }

func copiesTake(d time.Duration) { memspeed.Copying = func() time.Duration { return d } } // for 1 MiB
