//go:build !linux || !amd64

package ccall

import "unsafe"

// Available: Call does not work here.
const Available = false

// Call says no.
func Call(uintptr, unsafe.Pointer) bool { return false }
