//go:build !race

// Package raceedge tells the race detector that a Write comes before each later Read, as package
// syscall does for sockets with ioSync: a program that holds both ends of a connection passes variables
// along with the bytes. Without the race detector it does nothing.
package raceedge

// Release is called before bytes, or their end, go to the peer.
func Release() {}

// Acquire is called after bytes, or their end, have come from the peer.
func Acquire() {}
