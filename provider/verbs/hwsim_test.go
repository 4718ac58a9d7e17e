//go:build linux && cgo

package verbs

import (
	"os"
	"os/exec"
	"testing"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/test/hwsim"
)

// hwsimRuns are tests of the lanes with devices that run on the simulated one as well. The
// others are about the guest's network, or about what rxe and siw do.
var hwsimRuns = []struct{ name, settings, tests, skip string }{
	{"endpoints", "seed=1,jitter_us=8", "^TestEndpoint$/^(default|windows,_shared_queue)$", "TestEndpoint/.*/NoAllocation"},
	{"calm endpoints", "calm", "^TestEndpoint$/^(without_rdma_cm|without_windows|shared_queue)$", ""},
	{"end ahead of completions", "seed=2,kernel_us=0", "^TestEndpoint$/^(default|shared_queue)$/^Abort$", ""},
	{"connections", "seed=3", "^(TestPing|TestEveryDialIsAccepted|TestManyAtATime|TestTransfers|TestNothingIsLeft|" +
		"TestExposedIsTakenBackAtOnce|TestRefusals|TestHalfOpenRequests|TestRequestOfAnEndingChannel|TestDialsGivenUpLeaveNothing)$", ""},
	{"messages and memory", "seed=4", "^(TestLastOfWhatArrived|TestWindowBesideWhatWasDropped|TestFailedGroupTakesNobody|" +
		"TestPeerOverspends|TestMessageTooLong|TestSharedQueueLosesNothingUnnoticed|TestProbeEndsWithTheDevice|" +
		"TestWindowIsFreeBehindItsRevoke|TestWindowsAtATime|TestHostilePeer|TestPeerInvalidates|TestPeerSendsImmediateData)$", ""},
}

// TestOnHwsim runs them in processes of their own, which find the simulated device's
// libraries where the system's would be.
func TestOnHwsim(t *testing.T) {
	if testenv.Device() != "" {
		return // such a process, or the lane of real drivers
	}
	for _, tt := range hwsimRuns {
		t.Run(tt.name, func(t *testing.T) {
			f := hwsim.New(t, tt.settings)
			child := exec.Command(os.Args[0], "-test.run="+tt.tests, "-test.skip="+tt.skip, "-test.timeout=3m", "-test.v")
			child.Env = f.Env()
			if out, err := child.CombinedOutput(); err != nil {
				t.Fatalf("%s: %v\n%s", tt.settings, err, out)
			}
			f.Check(t)
		})
	}
}
