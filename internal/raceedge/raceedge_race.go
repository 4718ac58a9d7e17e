//go:build race

package raceedge

import (
	"runtime"
	"unsafe"
)

// ioSync stands for all connections, as in package syscall: what was written cannot be
// traced to the Read that gets it.
var ioSync int64

// Release is called before bytes, or their end, go to the peer.
func Release() { runtime.RaceReleaseMerge(unsafe.Pointer(&ioSync)) }

// Acquire is called after bytes, or their end, have come from the peer.
func Acquire() { runtime.RaceAcquire(unsafe.Pointer(&ioSync)) }
