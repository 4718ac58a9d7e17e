package regcache

import (
	"unsafe"
	"weak"
)

// Kind is the kind of memory that a slice lies in.
type Kind uint8

const (
	// Unknown memory is what there is no validator for: goroutine stacks, read-only
	// data, memory of C, mappings that were not declared.
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

// KindOf returns the kind of memory that b lies in. It is safe for any slice
// that Go code can have; an empty slice is Unknown.
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
	// The bytes around the slice that live and die with it, and so may be registered
	// together with it.
	lo, hi uintptr
	// object is where the object begins that the slice is alive in, for heap memory.
	object func() weak.Pointer[byte]
	// newValidator makes the validator of a registration within [lo, hi); the slice is
	// alive when it is called. nil for unknown memory.
	newValidator func() validator
}

// promised reports whether somebody vouches for more uses, by declaring or watching it.
func (m classified) promised() bool { return m.kind == Declared || m.kind == Watched }

// classify finds the kind of memory that b, which is not empty, lies in.
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
