//go:build !linux

package regcache

// mapMemory returns ordinary memory: on other systems there is no device to register it with.
func mapMemory(n int) ([]byte, error) { return make([]byte, n), nil }

func unmapMemory([]byte) error { return nil }
