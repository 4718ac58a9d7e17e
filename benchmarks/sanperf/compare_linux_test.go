package main

import "testing"

// In a container the file system may be read-only, and a temporary directory's path may be too long for
// a socket.
func TestCompareNeedsNoTemporaryDirectory(t *testing.T) {
	t.Setenv("TMPDIR", "/nonexistent")
	mustRun(t, "-rounds", "1", "-time", "2ms", "-warmup", "1ms")
}
