package spin

import "golang.org/x/sys/unix"

// osyield yields the processor to another thread that waits for it. The Go scheduler does not learn of
// it, because the call returns within a time slice.
func osyield() { unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0) }
