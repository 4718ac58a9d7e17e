package main

import (
	"errors"
	"fmt"
	"go/format"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/sanconn/san/internal/testenv"
)

// goroot is where the Go is that runs the tests.
func goroot(t *testing.T) string {
	t.Helper()
	out, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(out))
}

// otherGos are the oldest and the newest Go that are supported. They are tested in addition to the one
// that runs the tests.
var otherGos = []string{"go1.25.5", "go1.27.3"}

// gorootOf returns where the go command keeps another Go, which it may have to download first.
func gorootOf(t *testing.T, version string) string {
	t.Helper()
	cmd := exec.Command("go", "env", "GOROOT")
	cmd.Env = append(os.Environ(), "GOTOOLCHAIN="+version)
	out, err := cmd.Output()
	if err != nil {
		testenv.Missing(t, fmt.Sprintf("%s: %v", version, err))
	}
	return strings.TrimSpace(string(out))
}

func TestPatch(t *testing.T) {
	roots := []string{goroot(t)}
	for _, version := range otherGos {
		roots = append(roots, gorootOf(t, version))
	}
	for _, root := range roots {
		for _, e := range []edits{netEdits, syscallEdits} {
			files, err := e.patch(filepath.Join(root, "src", e.pkg), runtime.GOARCH)
			if err != nil {
				t.Errorf("%s: %v", root, err)
			}
			for name, text := range files {
				if formatted, err := format.Source(text); err != nil || string(formatted) != string(text) {
					t.Errorf("%s: %s/%s is not formatted, or does not parse: %v", root, e.pkg, name, err)
				}
			}
			for name, all := range e.renames {
				if n := strings.Count(string(files[name]), own); n != len(all) {
					t.Errorf("%s: %s/%s has %d renamed functions, want %d", root, e.pkg, name, n, len(all))
				}
			}
		}
	}
}

// TestUnknownShape changes package net in each way that would make the edits wrong: san has to refuse
// each.
func TestUnknownShape(t *testing.T) {
	type differs struct{ file, old, new, expected string }
	cases := []differs{
		{"tcpsock.go", "type TCPConn struct {\n\tconn\n", "type TCPConn struct {\n\tconn\n\tmore int\n",
			"net/tcpsock.go: TCPConn is not as expected: it should be struct { conn }, and is struct { conn; more int }"},
		{"tcpsock.go", "type TCPListener struct {", "type TCPListener2 struct {", "net/tcpsock.go: TCPListener"},
		{"tcpsock.go", "c := &TCPConn{conn{fd}}", "c := new(TCPConn); c.fd = fd", "net/tcpsock.go: newTCPConn"},
		{"tcpsock.go", "c := &TCPConn{conn{fd}}", "c := &TCPConn{conn{fd, nil}}", "TCPConn{conn{fd, nil}}"},
		{"tcpsock.go", "func newTCPConn(", "func (c *TCPConn) Steal() *netFD { return c.fd }\nfunc newTCPConn(",
			"net/tcpsock.go: (*TCPConn).Steal"},
		{"net.go", "func (c *conn) ok() bool", "func (c *conn) Abort() {}\nfunc (c *conn) ok() bool", "net/net.go: (*conn).Abort"},
		{"net.go", "func (c *conn) LocalAddr() Addr", "func (c *conn) Local() Addr", "net/net.go: (*conn).Local"},
		{"tcpsock.go", "func (c *TCPConn) CloseRead() error", "func (c *TCPConn) CloseRead(now bool) error", "CloseRead"},
		{"net.go", "func genericReadFrom(", "func steal(c *TCPConn) *netFD { return c.fd }\nfunc genericReadFrom(", "net/net.go: steal"},
	}
	for file, all := range renamed {
		for _, f := range all {
			name := parseFunc(f).Name.Name
			cases = append(cases, differs{file, ") " + name + "(", ") " + name + "2(", name},
				differs{file, "func " + name + "(", "func " + name + "2(", name})
		}
	}
	net := filepath.Join(goroot(t), "src", "net")
	for _, c := range cases {
		source, err := os.ReadFile(filepath.Join(net, c.file))
		if err != nil {
			t.Fatal(err)
		}
		text := string(source)
		if !strings.Contains(text, c.old) {
			if strings.HasPrefix(c.old, ")") || strings.HasPrefix(c.old, "func ") {
				continue // a name is either a method or a function: the other case has it
			}
			t.Errorf("net/%s has no %q", c.file, c.old)
		}
		dir := withFile(t, net, c.file, strings.Replace(text, c.old, c.new, 1))
		_, err = netEdits.patch(dir, runtime.GOARCH)
		if shape := (shapeError{}); !errors.As(err, &shape) || !strings.Contains(err.Error(), c.expected) {
			t.Errorf("%s: %q instead of %q: %v", c.file, c.new, c.old, err)
		}
	}
	read := filepath.Join(goroot(t), "src", "syscall")
	source, err := os.ReadFile(filepath.Join(read, "syscall_unix.go"))
	if err != nil {
		t.Fatal(err)
	}
	dir := withFile(t, read, "syscall_unix.go", strings.Replace(string(source), "func Read(fd int,", "func Read(fd uintptr,", 1))
	if _, err := syscallEdits.patch(dir, runtime.GOARCH); err == nil || !strings.Contains(err.Error(), "syscall/syscall_unix.go: Read is not as expected") {
		t.Error(err)
	}
	dir = withFile(t, net, "splice_linux.go", "")
	os.Remove(filepath.Join(dir, "splice_linux.go"))
	if _, err := netEdits.patch(dir, runtime.GOARCH); err == nil || !strings.Contains(err.Error(), "net/splice_linux.go") {
		t.Error(err)
	}
}

// withFile returns a directory with the files of dir, one of which has another text.
func withFile(t *testing.T, dir, name, text string) string {
	t.Helper()
	with := t.TempDir()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if !e.IsDir() && e.Name() != name {
			os.Symlink(filepath.Join(dir, e.Name()), filepath.Join(with, e.Name()))
		}
	}
	if err := os.WriteFile(filepath.Join(with, name), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return with
}
