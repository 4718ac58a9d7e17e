//go:build race

package raceedge

import (
	"runtime"
	"unsafe"
)

// ioSync stands for all connections, as in package syscall: it is not known which Write a Read gets its
// bytes from.
var ioSync int64

// Release is called before bytes, or their end, go to the peer.
func Release() { runtime.RaceReleaseMerge(unsafe.Pointer(&ioSync)) }

// Acquire is called after bytes, or their end, have come from the peer.
func Acquire() { runtime.RaceAcquire(unsafe.Pointer(&ioSync)) }
