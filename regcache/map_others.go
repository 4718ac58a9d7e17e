//go:build !linux

package regcache

// On other systems there is no device to register with, so any memory will do.
func mapMemory(n int) ([]byte, error) { return make([]byte, n), nil }

func unmapMemory([]byte) error { return nil }
