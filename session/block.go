package session

import "unsafe"

// blocksMin is from how many operations' worth on a Read's slice is filled by blocks of memory,
// which are the same wherever Reads of that memory begin: each is registered once. Else each
// Read that begins elsewhere would have its parts registered anew, in place of those that they
// overlap. Smaller objects are registered as a whole (regcache).
const blocksMin = 4

// toBlockEnd is how many bytes there are from the start of b to where the next block of memory
// begins, at a multiple of size. The address is only a number here, and nothing is reached by
// it: a slice on a stack that moves costs a registration.
func toBlockEnd(b []byte, size int) int {
	return size - int(uintptr(unsafe.Pointer(unsafe.SliceData(b)))%uintptr(size))
}
