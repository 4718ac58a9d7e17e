//go:build !linux

package shm

// Mechanisms returns none: the provider does not exist on this system.
func Mechanisms() []Mechanism { return nil }
