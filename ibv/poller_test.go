//go:build linux && cgo

package ibv

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// A descriptor that epoll refuses, such as a regular file's, has no poller: a wait for it could not be
// ended.
func TestADescriptorThatEpollRefusesHasNoPoller(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	fd, err := syscall.Dup(int(f.Fd())) // the caller that has passed it closes it
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(fd)
	if p, err := newPoller(fd, "event channel"); err == nil {
		p.close()
		t.Error("newPoller: no error")
	} else if !strings.Contains(err.Error(), "event channel") || !strings.Contains(err.Error(), "max_user_watches") {
		t.Errorf("newPoller: %v", err)
	}
}
