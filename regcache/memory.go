package regcache

import (
	"unsafe"
	"weak"
)

// Kind is the kind of memory that a slice lies in.
type Kind uint8

const (
	// Unknown memory has no validator: goroutine stacks, read-only data, memory of C, mappings that
	// were not declared.
	Unknown  Kind = iota
	Heap          // an object on Go's heap: valid while the object lives
	Global        // a variable of the program: always valid
	Declared      // stable by its owner's declaration, or an Arena's
	Watched       // userfaultfd reports changes of the mapping, see Watch
)

func (k Kind) String() string {
	names := [...]string{"unknown", "heap", "global", "declared", "watched"}
	if int(k) < len(names) {
		return names[k]
	}
	return names[Unknown]
}

// KindOf returns the kind of memory in which b lies. It is safe for any slice that Go code can have; an
// empty slice is Unknown.
func KindOf(b []byte) Kind {
	if len(b) == 0 {
		return Unknown
	}
	return classify(b).kind
}

// classified is the result of classify.
type classified struct {
	kind     Kind
	unforked bool // see Range
	// [lo, hi) are the bytes around the slice that live and die with it, and so may be registered
	// together with it.
	lo, hi uintptr
	// object returns the object that the slice is part of, for heap memory.
	object func() weak.Pointer[byte]
	// newValidator makes the validator of a registration within [lo, hi). The slice must be alive
	// during the call. nil for unknown memory.
	newValidator func() validator
}

// promised reports whether the owner has announced further uses, by declaring or watching the memory.
func (m classified) promised() bool { return m.kind == Declared || m.kind == Watched }

// classify finds the kind of memory in which b lies, which is not empty.
func classify(b []byte) classified {
	first := unsafe.Pointer(unsafe.SliceData(b))
	base, span, _ := findObject(uintptr(first), 0, 0)
	if base == 0 && span != nil {
		return classified{kind: Unknown} // a goroutine's stack, which may move at any call
	}
	if m, ok := ranges.memory(b); ok {
		return m
	}
	if base != 0 {
		return heapMemory(b, base)
	}
	return globalMemory(b)
}

func addressOf(b []byte) uintptr {
	return uintptr(unsafe.Pointer(unsafe.SliceData(b)))
}
