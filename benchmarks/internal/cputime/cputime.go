// Package cputime measures the processor time of a measurement.
package cputime

import "time"

// OfProcess is the processor time, user and system, that this process has used so far; 0
// where the system does not count it.
func OfProcess() time.Duration { return ofProcess() }
