package spin

import "golang.org/x/sys/unix"

// osyield lets another thread have this processor, if one waits for it. It
// bypasses the Go scheduler: it comes back within a time slice.
func osyield() { unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0) }
