package san

import (
	"testing"
	"testing/synctest"
	"time"
)

func passed(d *acceptDeadline) bool {
	select {
	case <-d.wait():
		return true
	default:
		return false
	}
}

// A deadline that is moved at the moment at which it passes: its timer has fired, and its
// function may not have run yet.
func TestAcceptDeadlineMovedAsItPasses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for i := range 1000 {
			var d acceptDeadline
			at := time.Now().Add(time.Second)
			d.set(at)
			time.Sleep(time.Until(at)) // virtual
			d.set(time.Now().Add(-1))
			if !passed(&d) {
				t.Fatalf("%d: has not passed", i)
			}
		}
	})
}

func TestAcceptDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var d acceptDeadline
		waiting := d.wait()
		d.set(time.Now().Add(time.Hour))
		d.set(time.Now().Add(time.Minute))
		time.Sleep(time.Minute + 1)
		select {
		case <-waiting:
		default:
			t.Error("a wait from before has not ended")
		}
		if !passed(&d) {
			t.Error("has not passed")
		}
		d.set(time.Time{})
		if passed(&d) {
			t.Error("was cleared and has passed all the same")
		}
		d.set(time.Now().Add(-1))
		if !passed(&d) {
			t.Error("one in the past has not passed at once")
		}
		d.set(time.Now().Add(-1))
		d.set(time.Now().Add(time.Second))
		if passed(&d) {
			t.Error("was moved into the future and has passed all the same")
		}
		time.Sleep(time.Second + 1)
		if !passed(&d) {
			t.Error("has not passed after it was moved")
		}
	})
}
