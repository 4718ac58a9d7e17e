package session

import (
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// pollSlice is several times the scheduler's own slice (0.7 to 3 ms by the number of
// processors), and no longer than the runtime lets a goroutine run.
const pollSlice = 10 * time.Millisecond

// longSlice tells the scheduler that this thread is in no hurry, and whether it knows.
// Who polls for a thread of the kernel may be on the processor that this one needs.
// Since Linux 6.12 one that is woken, and has not had more than its share, takes it from
// a thread with a longer slice (PREEMPT_SHORT, do_preempt_short in kernel/sched/fair.c);
// from one with the same he does so at the end of the slice. The thread, and what
// threads and processes are made by it, keep the slice. It changes no priority; but
// where others want the processor too, sched_yield leaves it to them for up to a slice.
func longSlice() bool {
	runtime.LockOSThread() // both calls are about the same thread
	defer runtime.UnlockOSThread()
	a, err := unix.SchedGetAttr(0, 0)
	switch {
	case err != nil, a.Runtime == 0: // an older kernel, or a sandbox
		return false
	case a.Policy != unix.SCHED_NORMAL && a.Policy != unix.SCHED_BATCH: // whose runtime is another matter, or none
		return false
	case a.Runtime >= uint64(pollSlice):
		return true
	}
	a.Runtime = uint64(pollSlice)
	return unix.SchedSetAttr(0, a, 0) == nil
}
