//go:build !linux

package shm

// Mechanisms has none: the provider does not exist on this system.
func Mechanisms() []Mechanism { return nil }
