package testenv

import (
	"testing"

	"golang.org/x/sys/unix"
)

// WithoutDescriptors calls f while this process gets no new descriptors; open ones stay open.
func WithoutDescriptors(t testing.TB, f func()) {
	t.Helper()
	var was unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Max: was.Max}); err != nil {
		t.Fatal(err)
	}
	defer func() { // even if f ends the test
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
			t.Error(err)
		}
	}()
	f()
}
