package session

import (
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// longSlice changes the slice of its thread and nothing else of it, and says whether
// the kernel took it; a thread whose policy has no slices it leaves as it is.
func TestLongSlice(t *testing.T) {
	tests := []struct {
		name   string
		policy uint32
		nice   int32
		slices bool
	}{
		{"normal", unix.SCHED_NORMAL, 0, true},
		{"nice", unix.SCHED_NORMAL, 5, true},
		{"batch", unix.SCHED_BATCH, 3, true},
		{"idle", unix.SCHED_IDLE, 0, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			done := make(chan struct{})
			go func() {
				defer close(done)
				runtime.LockOSThread() // and never unlocked: the thread ends with us
				attr := func() unix.SchedAttr {
					a, err := unix.SchedGetAttr(0, 0)
					if err != nil {
						t.Error(err)
						return unix.SchedAttr{}
					}
					return *a
				}
				before := attr()
				before.Policy, before.Nice = tt.policy, max(before.Nice, tt.nice)
				if err := unix.SchedSetAttr(0, &before, 0); err != nil {
					t.Error(err)
					return
				}
				before = attr()
				want := before
				took := tt.slices && before.Runtime != 0 // before Linux 6.12 it is 0
				if took {
					want.Runtime = max(before.Runtime, uint64(pollSlice))
				}
				for range 2 { // the second time it is there already
					if got := longSlice(); got != took {
						t.Errorf("longSlice: %v, want %v of %+v", got, took, before)
					}
					if got := attr(); got != want {
						t.Errorf("the thread has %+v, want %+v", got, want)
					}
				}
			}()
			<-done
		})
	}
}
