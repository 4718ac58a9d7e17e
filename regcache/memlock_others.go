//go:build !linux

package regcache

// MemlockLimit says that nothing limits locked memory.
func MemlockLimit() (limit int64, limited bool) { return 0, false }
