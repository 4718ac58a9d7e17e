//go:build unix

package main

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
)

// A server that a service manager terminates must remove its socket file: otherwise the next server
// could not start.
func TestATerminatedServer(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	for range 2 {
		cmd := exec.Command(os.Args[0], "server", "-l", "unix:"+path)
		cmd.Stderr = testWriter{t}
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		bufio.NewScanner(out).Scan() // now it listens, or has failed
		cmd.Process.Signal(syscall.SIGTERM)
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
	}
}
