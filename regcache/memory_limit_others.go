//go:build !linux

package regcache

// memoryLimit is how many bytes of memory this process may have; 0: it is not known.
func memoryLimit() int64 { return 0 }
