package san

import (
	"bytes"
	"fmt"
	"runtime"
	"testing"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/test/hwsim"
)

// held is what a process must release. objects are the kernel's RDMA objects.
type held struct {
	goroutines, descriptors, mappings, objects int
}

func resources(t testing.TB) held {
	t.Helper()
	var kinds map[string]int
	switch inGuest {
	case "":
	case hwsim.Lane:
		kinds = hwsim.Objects(t)
	default:
		kinds = testenv.RDMAObjects(t)
	}
	objects := 0
	for _, n := range kinds {
		objects += n
	}
	runtime.GC()
	return held{runtime.NumGoroutine(), countDescriptors(t), countMappings(t), objects}
}

// wantResources waits until the process holds no more than before.
func wantResources(t testing.TB, before held) {
	t.Helper()
	testenv.Eventually(t, testTimeout, func() error {
		now := resources(t)
		if now.goroutines <= before.goroutines && now.descriptors <= before.descriptors && now.mappings <= before.mappings && now.objects <= before.objects {
			return nil
		}
		stacks := make([]byte, 1<<20)
		stacks = stacks[:runtime.Stack(stacks, true)]
		return fmt.Errorf("before %+v, now %+v\n%s", before, now, bytes.TrimSpace(stacks))
	})
}
