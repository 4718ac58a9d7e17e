package regcache

import (
	"runtime"
	"sync"
	"unsafe"
)

// globalMemory describes b if it lies in the program's variables. They are
// mapped from start to end of the process. b is not in the runtime's memory.
func globalMemory(b []byte) memory {
	if !globalsCanBeTold() || !isGlobal(&b[0]) || !isGlobal(&b[len(b)-1]) {
		return memory{kind: Unknown}
	}
	start := addressOf(b)
	return memory{
		kind:  Global,
		lo:    start,
		hi:    start + uintptr(len(b)),
		prove: func() proof { return always{} },
	}
}

// isGlobal tells variables from other memory outside the heap, for pointers
// that are not into the runtime's memory. runtime.AddCleanup does nothing for
// one into a module's data or bss, and panics, so that one can recover, for one
// that it does not know: read-only data, foreign memory. (SetFinalizer and
// weak.Make end the process there.)
func isGlobal(p *byte) (yes bool) {
	defer func() {
		if recover() != nil {
			yes = false
		}
	}()
	return runtime.AddCleanup(p, func(int) {}, 0) == runtime.Cleanup{}
}

// globalsCanBeTold is false with GODEBUG=sbrk=1: AddCleanup does nothing then,
// whatever it is asked about.
var globalsCanBeTold = sync.OnceValue(func() bool {
	const readOnly = "a constant is no variable"
	return !isGlobal(unsafe.StringData(readOnly))
})

// always is the proof for memory whose mapping lasts as long as the process.
type always struct{}

func (always) valid() bool           { return true }
func (always) attach(*Region)        {}
func (always) detach(*Region, error) {}
