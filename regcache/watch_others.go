//go:build !linux

package regcache

import (
	"fmt"
	"syscall"
)

// watcher exists on Linux only.
type watcher struct{}

func (*watcher) quiet() bool { return false }

func (*watcher) close([]byte) {}

// Watch needs Linux.
func Watch([]byte) (*Range, error) {
	return nil, fmt.Errorf("regcache: watch: %w", syscall.ENOSYS)
}
