package regcache

import (
	"runtime"
	"sync"
	"unsafe"
)

// globalMemory describes b if it lies in the program's variables, which stay mapped as long as the
// process lives. b must not be in the runtime's memory.
func globalMemory(b []byte) classified {
	if !globalsAreRecognized() || !isGlobal(&b[0]) || !isGlobal(&b[len(b)-1]) {
		return classified{kind: Unknown}
	}
	start := addressOf(b)
	return classified{
		kind:         Global,
		lo:           start,
		hi:           start + uintptr(len(b)),
		newValidator: func() validator { return always{} },
	}
}

// isGlobal distinguishes variables from read-only data and foreign memory, for pointers outside the
// runtime's memory. runtime.AddCleanup does nothing for a pointer into a module's data or bss, and
// panics for a pointer elsewhere; the panic can be recovered. (SetFinalizer and weak.Make would end the
// process.)
func isGlobal(p *byte) (yes bool) {
	defer func() {
		if recover() != nil {
			yes = false
		}
	}()
	return runtime.AddCleanup(p, func(int) {}, 0) == runtime.Cleanup{}
}

// globalsAreRecognized is false with GODEBUG=sbrk=1, with which AddCleanup does nothing for any
// pointer.
var globalsAreRecognized = sync.OnceValue(func() bool {
	const readOnly = "a constant is no variable"
	return !isGlobal(unsafe.StringData(readOnly))
})

// always is the validator of memory that stays mapped as long as the process lives.
type always struct{}

func (always) valid() bool           { return true }
func (always) attach(*Region)        {}
func (always) detach(*Region, error) {}
