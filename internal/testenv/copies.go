package testenv

import (
	"time"

	"github.com/sanconn/san/internal/memspeed"
)

// SlowCopies makes package verbs assume that this host copies at 1 GB/s. Then Writes are offered from 1
// MiB on, and registering 1 MiB with the simulated device costs one copy, on every machine and at most
// loads: it takes 60 to 90 µs if nobody else is busy.
func SlowCopies() { copiesTake(time.Millisecond) }

// FastCopies makes package verbs assume that this host copies at 100 GB/s.
func FastCopies() { copiesTake(10 * time.Microsecond) }

func copiesTake(d time.Duration) { memspeed.Copying = func() time.Duration { return d } } // for 1 MiB
