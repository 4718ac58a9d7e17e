package main

import "testing"

// The file system of a container may be read-only, and a path too long for a socket.
func TestCompareNeedsNoTemporaryDirectory(t *testing.T) {
	t.Setenv("TMPDIR", "/nonexistent")
	mustRun(t, "-rounds", "1", "-time", "2ms", "-warmup", "1ms")
}
