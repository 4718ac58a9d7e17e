package testenv

import (
	"testing"
	"time"
)

// Eventually calls ask until it returns no error, and fails the test with the last error
// when limit is over. It is for what no event announces: goroutines and kernel objects that
// end in the background. For everything else wait for the event.
func Eventually(t testing.TB, limit time.Duration, ask func() error) {
	t.Helper()
	for end := time.Now().Add(limit); ; time.Sleep(5 * time.Millisecond) {
		err := ask()
		if err == nil {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("after %v: %v", limit, err)
		}
	}
}
