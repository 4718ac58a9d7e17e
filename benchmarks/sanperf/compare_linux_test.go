package main

import "testing"

// A container's file system may be read-only, and a path may be too long for a socket.
func TestCompareNeedsNoTemporaryDirectory(t *testing.T) {
	t.Setenv("TMPDIR", "/nonexistent")
	mustRun(t, "-rounds", "1", "-time", "2ms", "-warmup", "1ms")
}
