//go:build !linux

package regcache

// MemlockLimit returns that no limit applies.
func MemlockLimit() (limit int64, limited bool) { return 0, false }

// memoryLimit is how many bytes of memory this process may have; 0: it is not known.
func memoryLimit() int64 { return 0 }
