package verbs

import (
	"testing"

	"github.com/sanconn/san/internal/testenv"
)

// The device of the lane is known for what it is: the session waits otherwise where
// threads of the kernel are the device.
func TestWorkerIsRxe(t *testing.T) {
	a, b := pair(t, listen(t, Config{}), Config{})
	want := testenv.Device() == "rxe"
	for _, e := range []*Endpoint{a, b} {
		if got := e.Limits().Worker; got != want {
			t.Errorf("on %s, vendor %#x: Worker is %v", e.dev.ctx.Name, e.dev.caps.VendorID, got)
		}
	}
}
