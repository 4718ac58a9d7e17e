package testenv

import (
	"fmt"
	"testing"
)

// ending is a testing.TB that records how the test ended.
type ending struct {
	testing.TB
	how string
	why string // the failure's message
}

func (e *ending) Helper()              {}
func (e *ending) Skipf(string, ...any) { e.how = "skipped"; panic(e) }
func (e *ending) Skip(...any)          { e.how = "skipped"; panic(e) }

func (e *ending) Fatalf(format string, args ...any) {
	e.how, e.why = "failed", fmt.Sprintf(format, args...)
	panic(e)
}

func end(f func(testing.TB)) (how string) {
	e := &ending{}
	defer func() {
		if recover() != nil {
			how = e.how
		}
	}()
	f(e)
	return "ran"
}

// Something missing is a failure if everything must run, and in a lane with a device.
func TestMissing(t *testing.T) {
	for _, tt := range []struct{ device, require, missing, none string }{
		{"", "", "skipped", ""},
		{"", "1", "failed", ""},
		{"rxe", "", "failed", "skipped"},
		{"siw", "1", "failed", "skipped"},
	} {
		t.Setenv("SAN_TEST_RDMA", tt.device)
		t.Setenv("SAN_TEST_REQUIRE", tt.require)
		if how := end(func(t testing.TB) { Missing(t, "it") }); how != tt.missing {
			t.Errorf("%+v: %s", tt, how)
		}
		if tt.device == "" {
			continue // it depends on the machine
		}
		if how := end(NeedNoDevice); how != tt.none {
			t.Errorf("%+v: no device: %s", tt, how)
		}
		if how := end(func(t testing.TB) { NeedDevice(t) }); how != "ran" {
			t.Errorf("%+v: a device: %s", tt, how)
		}
	}
}
