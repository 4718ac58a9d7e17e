package verbs

import (
	"testing"
	"time"
)

// What a wake takes is found out, within bounds.
func TestSpinTime(t *testing.T) {
	wake := wakeTime()
	if wake <= 0 || wake > time.Second {
		t.Errorf("a wake takes %v", wake)
	}
	if spin := spinTime(); spin < minSpin || spin > maxSpin {
		t.Errorf("polls for %v, outside %v to %v", spin, minSpin, maxSpin)
	}
}
