//go:build !linux

package regcache

// MemlockLimit reports that no limit applies.
func MemlockLimit() (limit int64, limited bool) { return 0, false }

// MemoryLimit returns 0: the limit is not known.
func MemoryLimit() int64 { return 0 }
