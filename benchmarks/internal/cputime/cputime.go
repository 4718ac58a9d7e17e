// Package cputime measures the processor time of a measurement.
package cputime

import "time"

// OfProcess returns the processor time, user and system, that this process has used so far. It is 0 if
// the system does not count it.
func OfProcess() time.Duration { return ofProcess() }
