package session

import (
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// pollSlice is several times the scheduler's own slice (0.7 to 3 ms by the number of
// processors), and no longer than the runtime lets a goroutine run.
const pollSlice = 10 * time.Millisecond

// longSlice asks the scheduler for a long time slice for this thread, and reports whether
// it has one. A thread that polls for a kernel thread may be on the processor which that
// one needs. Since Linux 6.12 a thread that is woken, and has not had more than its
// share, preempts one with a longer slice (PREEMPT_SHORT, do_preempt_short in
// kernel/sched/fair.c), but waits for the end of a slice that is no longer than its own.
// The thread keeps the slice, and threads and processes that it creates inherit it. No
// priority changes, but sched_yield may leave a contended processor to others for up to
// a slice.
func longSlice() bool {
	runtime.LockOSThread() // both calls are about the same thread
	defer runtime.UnlockOSThread()
	a, err := unix.SchedGetAttr(0, 0)
	switch {
	case err != nil, a.Runtime == 0: // an older kernel, or a sandbox
		return false
	case a.Policy != unix.SCHED_NORMAL && a.Policy != unix.SCHED_BATCH: // there Runtime is absent or means something else
		return false
	case a.Runtime >= uint64(pollSlice):
		return true
	}
	a.Runtime = uint64(pollSlice)
	return unix.SchedSetAttr(0, a, 0) == nil
}
