//go:build linux && cgo

package ibv

import (
	"runtime"
	"syscall"
	"testing"

	"github.com/sanconn/san/internal/ccall"
)

// throughRuntime has the hot calls made by cgo, as where ccall does not work.
func throughRuntime(t *testing.T) {
	direct = false
	t.Cleanup(func() { direct = ccall.Available })
}

// The hot calls say the same both ways, and go the way that they should: cgo counts its
// calls. No device is needed to be told that there is no queue.
func TestHotCallsOfNoQueue(t *testing.T) {
	const times = 100
	for _, cgo := range []bool{false, true} {
		if cgo {
			throughRuntime(t)
		}
		before := runtime.NumCgoCall()
		for range times {
			if n := sysPollCQ(0, make([]WC, 1), 1); n != -int(syscall.EBADF) {
				t.Fatalf("by cgo %v: a poll says %d", cgo, n)
			}
			for name, post := range map[string]func() (int, int){
				"send":                func() (int, int) { return sysPostSend(0, make([]SendWR, 1)) },
				"receive":             func() (int, int) { return sysPostRecv(0, make([]RecvWR, 1)) },
				"receive of a shared": func() (int, int) { return sysPostSRQRecv(0, make([]RecvWR, 1)) },
			} {
				if n, errno := post(); n != 0 || errno != int(syscall.EBADF) {
					t.Fatalf("by cgo %v: %s: %d posted, errno %d", cgo, name, n, errno)
				}
			}
		}
		calls := runtime.NumCgoCall() - before
		if want := cgo || !ccall.Available; (calls >= 4*times) != want {
			t.Errorf("by cgo %v: %d calls by cgo of %d", cgo, calls, 4*times)
		}
	}
}

// What moves bytes on a device does so by cgo too.
func TestHotCallsThroughTheRuntime(t *testing.T) {
	throughRuntime(t)
	t.Run("SendAndReceive", TestSendAndReceive)
	t.Run("FullQueueSaysHowMuchWasPosted", TestFullQueueSaysHowMuchWasPosted)
	t.Run("SharedReceiveQueue", TestSharedReceiveQueue)
	t.Run("HotCallsDoNotAllocate", TestHotCallsDoNotAllocate)
}
