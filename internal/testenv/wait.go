package testenv

import (
	"testing"
	"time"
)

// Eventually asks until there is no error any more, for what nothing announces:
// goroutines and the kernel's objects that go in the background. It fails the test
// with the last error when the limit is over. What announces itself is waited for
// by its event.
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
