package spin

import "golang.org/x/sys/unix"

// osyield yields the processor to another thread that waits for it. The Go scheduler need not know of
// the call, because it returns within a time slice.
func osyield() { unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0) }
