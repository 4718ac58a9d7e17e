package verbs

import "unsafe"

// addressOf is the address of a slice's memory, as the device gets it. The
// memory is an arena's, which is not the Go heap's, or is kept alive and
// unmoved by a registration that holds it.
func addressOf(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }
