package session

import "unsafe"

// blocksMin is how many times the size of an operation a Read's slice must have to be filled by blocks
// of memory. The blocks are the same wherever Reads of that memory begin, so each is registered once.
// Otherwise each Read that begins elsewhere would register its parts anew, in place of those that they
// overlap. Smaller objects are registered as a whole (regcache).
const blocksMin = 4

// toBlockEnd returns how many bytes there are from the start of b to the next block of memory, at a
// multiple of size. The address is used only as a number. If a slice is on a stack that moves, that
// costs a registration.
func toBlockEnd(b []byte, size int) int {
	return size - int(uintptr(unsafe.Pointer(unsafe.SliceData(b)))%uintptr(size))
}
