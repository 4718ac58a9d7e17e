package testenv

import (
	"fmt"
	"testing"
	"time"
)

// Eventually calls ask until it returns no error, and fails the test with the last error after limit.
// It is for what no event announces: goroutines and kernel objects that end in the background. For
// everything else wait for the event.
func Eventually(t testing.TB, limit time.Duration, ask func() error) {
	t.Helper()
	if err := Await(limit, ask); err != nil {
		t.Fatal(err)
	}
}

// Await is Eventually without a test, as in a process that a test has started.
func Await(limit time.Duration, ask func() error) error {
	end := time.Now().Add(limit)
	for pause := 100 * time.Microsecond; ; pause = min(2*pause, 5*time.Millisecond) {
		err := ask()
		if err == nil {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("after %v: %w", limit, err)
		}
		time.Sleep(pause)
	}
}
