// Package ccall calls functions of C that end within microseconds and never sleep: without
// what the runtime does around a call by cgo (runtime/cgocall.go), which offers the
// processor (P) to others for as long as the call lasts, and takes it back. That costs
// more than an empty poll of a completion queue.
//
// The rule that makes it right: to the runtime such a call is a piece of assembly that the
// goroutine runs through. It is not preempted, so its stack does not move; a collection
// waits for it, as for any loop, hence microseconds. C runs on a stack from here, large
// enough for it, on the goroutine's thread, so that what C keeps for each thread is right.
// Signals are handled on the stack that the runtime gives each thread, and find no Go
// function in C: nothing is preempted there, and a profile says external code. A crash in
// C ends the program, as it does in cgo.
package ccall

import (
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Available: Call works here.
const Available = true

const (
	// stackSize: a poll of 32 completions has 2 KiB, and the dynamic linker may need
	// 12 KiB for the processor's registers when it binds a function at its first call.
	// Pages that are not used have no memory.
	stackSize = 64 << 10
	// above the stack lie zeros: what unwinds a goroutine by a signal between the two
	// switches of stacks finds no caller there.
	above = 4 << 10
	guard = 4 << 10 // below it; also the page, on which mmap is aligned
)

// shelf keeps stacks that are not in use, each on a cache line of its own.
var shelf [64]struct {
	stack atomic.Uintptr // the top; 0: none
	_     [56]byte
}

//go:noescape
func call(fn, stack uintptr, arg unsafe.Pointer)

// Call calls fn, the address of a C function, void (*)(void *), with arg, on the calling
// thread. The function keeps no pointer, calls nothing of Go's, and does not block. Call
// says no, and has not called it, if there is no memory for a stack.
func Call(fn uintptr, arg unsafe.Pointer) bool {
	// Goroutines have different stacks: those at work take different places.
	var here byte
	place := uintptr(unsafe.Pointer(&here)) >> 12
	slot := &shelf[place%uintptr(len(shelf))].stack
	stack := slot.Swap(0)
	if stack == 0 {
		if stack = newStack(); stack == 0 {
			return false
		}
	}
	call(fn, stack, arg)
	if !slot.CompareAndSwap(0, stack) {
		freeStack(stack)
	}
	return true
}

// newStack is the top of a new stack, 0: there is no memory.
func newStack() uintptr {
	p, err := unix.MmapPtr(-1, 0, nil, guard+stackSize+above, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return 0
	}
	top := uintptr(p) + guard + stackSize
	if unix.Mprotect(unsafe.Slice((*byte)(p), guard), unix.PROT_NONE) != nil {
		freeStack(top)
		return 0
	}
	return top
}

func freeStack(top uintptr) {
	unix.Syscall(unix.SYS_MUNMAP, top-stackSize-guard, guard+stackSize+above, 0)
}
