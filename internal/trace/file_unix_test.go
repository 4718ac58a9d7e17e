//go:build unix

package trace

import (
	"os"
	"syscall"
	"testing"
)

// Another user who can write to the directory can neither redirect what is written, nor delay the
// process.
func TestOpenFollowsNoLink(t *testing.T) {
	dir := t.TempDir()
	victim := dir + "/victim"
	if err := os.WriteFile(victim, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, plant := range map[string]func(path string) error{
		"symlink": func(p string) error { return os.Symlink(victim, p) },
		"link":    func(p string) error { return os.Link(victim, p) },
		"fifo":    func(p string) error { return syscall.Mkfifo(p, 0o600) },
		"dir":     func(p string) error { return os.Mkdir(p, 0o700) },
	} {
		path := dir + "/" + name
		if err := plant(path); err != nil {
			t.Fatal(err)
		}
		if l, err := Open(path); err == nil {
			t.Errorf("%s: opened %v", name, l)
		}
		os.Remove(path)
	}
	if os.Geteuid() == 0 {
		if err := os.Chown(victim, 1, -1); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(victim); err == nil {
			t.Error("another user's file was opened")
		}
	}
	if _, err := Open(dir + "/new"); err != nil {
		t.Error(err)
	}
	if info, err := os.Stat(dir + "/new"); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
}
