package regcache

import (
	"runtime"
	"unsafe"
	"weak"
)

// findObject is the runtime's own. It returns the base of the heap object that holds p,
// and the span of pages around it. The base is 0 outside of objects; the span is nil if
// the memory is not the runtime's, but not for stacks. Its signature is to remain stable
// (see its comment in runtime/mbitmap.go and go.dev/issue/67401). There is no
// other safe test: weak.Make ends the process if its argument is not Go's, and
// runtime.AddCleanup does if it is on a stack that moves meanwhile.
//
// It ends the process for an address in a span that the runtime has freed, which no slice
// in use can have. A pointer must be converted to p in the call itself, where no stack
// can move.
//
//go:linkname findObject runtime.findObject
//go:noescape
func findObject(p, refBase, refOff uintptr) (base uintptr, span unsafe.Pointer, index uintptr)

// heapMemory describes the object at base in which b begins. The object reaches at least to the end of
// b. Nothing beyond is relied on, not even b's capacity, because slices made with unsafe may claim too
// much. The part before b may be registered along with it if it is not longer than b, as for a buffer
// whose first bytes were sent otherwise. So a large object that is sent piece by piece is not
// registered from its start each time.
func heapMemory(b []byte, base uintptr) classified {
	first := unsafe.Pointer(unsafe.SliceData(b))
	if last, _, _ := findObject(uintptr(first)+uintptr(len(b)-1), 0, 0); last != base {
		return classified{kind: Unknown} // not a slice that Go made
	}
	lo := base
	if uintptr(first)-base > uintptr(len(b)) {
		lo = uintptr(first)
	}
	object := func() weak.Pointer[byte] {
		return weak.Make((*byte)(unsafe.Add(first, -int(uintptr(first)-base))))
	}
	return classified{
		kind:         Heap,
		lo:           lo,
		hi:           uintptr(first) + uintptr(len(b)),
		object:       object,
		newValidator: func() validator { return &objectLives{object: object()} },
	}
}

// objectLives is the validator of heap memory. The runtime never moves a live object and never gives
// its pages back (it scavenges only free spans). So a registration is right as long as the object
// lives. The weak pointer points to the object's base, because each other offset would need a record in
// the object's span, and such records are searched linearly.
//
// The caller of a hit holds the slice, so the object cannot die between valid and the release either.
type objectLives struct {
	object  weak.Pointer[byte]
	cleanup runtime.Cleanup
}

func (p *objectLives) valid() bool { return p.object.Value() != nil }

// attach makes the region be pruned after the object's death. The memory may be in use again before
// that, so valid does not rely on it.
func (p *objectLives) attach(r *Region) {
	defer func() {
		if recover() != nil { // GOEXPERIMENT=arenas: such memory is freed by hand and has no cleanups
			p.object = weak.Pointer[byte]{}
		}
	}()
	if object := p.object.Value(); object != nil {
		p.cleanup = runtime.AddCleanup(object, prune, r)
	}
}

// prune is the cleanup. All cleanups of the program share a few goroutines, often one, so a goroutine
// of the cache deregisters, which may take any time.
func prune(r *Region) {
	if r.expel(ObjectDied) {
		r.cache.dropLater(r)
	}
}

func (p *objectLives) detach(*Region, error) {
	object := p.object.Value()
	if object == nil {
		return // the cleanup is running, or has run
	}
	p.cleanup.Stop()
	runtime.KeepAlive(object)
}
