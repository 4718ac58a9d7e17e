//go:build unix

package main

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestSocketFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	open := func() (net.Listener, error) { return listenUnix(t.Context(), path, nil) }
	l, err := open()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := open(); err == nil || !strings.Contains(err.Error(), "another process listens there") {
		t.Errorf("while it is in use: %v", err)
	}
	l.(*socketFile).UnixListener.Close()
	if l, err = open(); err != nil {
		t.Fatalf("where a process has left it behind: %v", err)
	}
	l.Close()
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("behind Close: %v", err)
	}
	if err := os.WriteFile(path, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := open(); err == nil || !strings.Contains(err.Error(), "no socket") {
		t.Errorf("where there is a file: %v", err)
	}
	if b, err := os.ReadFile(path); string(b) != "precious" {
		t.Errorf("the file: %q, %v", b, err)
	}
}

// While a process ends, the operator may have given its path to a successor: Close must not remove the
// successor's file.
func TestSocketFileOfASuccessorStays(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	old, err := listenUnix(t.Context(), path, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	successor, err := listenUnix(t.Context(), path, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer successor.Close()
	old.Close()
	old.Close()
	dial(t, address{unixNetwork, path})
}
