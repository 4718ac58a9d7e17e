package regcache

import (
	"runtime"
	"unsafe"
	"weak"
)

// findObject is the runtime's own: the base of the heap object that holds p,
// and the span of pages that it lies in. The base is 0 outside of objects; the
// span is nil where the memory is not the runtime's, and not nil for stacks. It
// promises to stay as it is (see its comment in runtime/mbitmap.go and
// go.dev/issue/67401), and is the only safe way to ask: weak.Make ends the
// process when its argument is not Go's, and runtime.AddCleanup does when it is
// on a stack that moves under it.
//
// It ends the process itself for an address in memory that the runtime has
// free, which no slice in use can have. The conversion of a pointer to p has to
// stand in the call, where no stack can move.
//
//go:linkname findObject runtime.findObject
//go:noescape
func findObject(p, refBase, refOff uintptr) (base uintptr, span unsafe.Pointer, index uintptr)

// heapMemory describes the object at base that b begins in. It is at least
// [base, end of b); what comes after, even b's capacity, is not relied on:
// slices made with unsafe claim capacities that are not theirs. The part before
// b may come along when it is no longer than b, as for a buffer whose first
// bytes went another way; a large object is not registered from its start again
// and again while it is sent piece by piece.
func heapMemory(b []byte, base uintptr) memory {
	first := unsafe.Pointer(unsafe.SliceData(b))
	if last, _, _ := findObject(uintptr(first)+uintptr(len(b)-1), 0, 0); last != base {
		return memory{kind: Unknown} // not a slice that Go made
	}
	lo := base
	if uintptr(first)-base > uintptr(len(b)) {
		lo = uintptr(first)
	}
	return memory{
		kind: Heap,
		lo:   lo,
		hi:   uintptr(first) + uintptr(len(b)),
		prove: func() proof {
			object := (*byte)(unsafe.Add(first, -int(uintptr(first)-base)))
			return &objectLives{object: weak.Make(object)}
		},
	}
}

// objectLives is the proof for heap memory. The runtime never moves a live
// object and never gives its pages back (it scavenges free spans only), so a
// registration is right exactly while the object lives. The weak pointer is
// made for the object's base: each distinct offset would cost a record in the
// object's span, and those are searched one by one.
//
// The hit's caller holds the slice, so the object cannot die between the proof
// and the release either.
type objectLives struct {
	object  weak.Pointer[byte]
	cleanup runtime.Cleanup
}

func (p *objectLives) valid() bool { return p.object.Value() != nil }

// attach has the region pruned after the object's death. Cleanups run some
// time later, when the memory may be in use again: valid does not wait for
// them.
func (p *objectLives) attach(r *Region) {
	defer func() {
		if recover() != nil { // GOEXPERIMENT=arenas: freed by hand, no cleanups
			p.object = weak.Pointer[byte]{}
		}
	}()
	if object := p.object.Value(); object != nil {
		p.cleanup = runtime.AddCleanup(object, prune, r)
	}
}

// prune is the cleanup. The program's cleanups have few goroutines, often one, so
// deregistering, which takes as long as the device likes, is left to the cache.
func prune(r *Region) {
	if r.expel(ObjectDied) {
		r.cache.dropLater(r)
	}
}

func (p *objectLives) detach(*Region, error) {
	object := p.object.Value()
	if object == nil {
		return // the cleanup runs, or has run
	}
	p.cleanup.Stop()
	runtime.KeepAlive(object)
}
