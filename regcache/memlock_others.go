//go:build !linux

package regcache

// MemlockLimit returns that no limit applies.
func MemlockLimit() (limit int64, limited bool) { return 0, false }
