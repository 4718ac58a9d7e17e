package verbs

import (
	"io/fs"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/session"
)

// Device files that may not be opened are the reason at once, and remembered: the
// libraries would wait for five seconds each time.
func TestNodesThatMayNotBeOpened(t *testing.T) {
	tries := 0
	before := tryNode
	t.Cleanup(func() {
		tryNode = before
		forgetNodes()
	})
	for _, errno := range []syscall.Errno{syscall.EACCES, syscall.EPERM} { // the file's mode, the devices cgroup
		forgetNodes()
		tries = 0
		tryNode = func(path string) error {
			tries++
			return &fs.PathError{Op: "open", Path: path, Err: errno}
		}
		at := netip.MustParseAddrPort("127.0.0.1:1")
		for range 3 {
			if _, err := Dial(patient(t), netip.Addr{}, at, Config{}); reasonOf(err) != session.ReasonPermission {
				t.Errorf("%v: Dial: %v", errno, err)
			}
		}
		if tries != 1 {
			t.Errorf("%v: tried %d times", errno, tries)
		}
		nodes.mu.Lock()
		if nodes.until.After(time.Now().Add(refusedFor)) {
			t.Errorf("remembered until %v", nodes.until)
		}
		nodes.until = time.Now()
		nodes.mu.Unlock()
		tryNode = func(string) error { return nil }
		if err := nodesRefused(); err != nil {
			t.Errorf("%v: once it may be opened: %v", errno, err)
		}
	}
}

func forgetNodes() {
	nodes.mu.Lock()
	defer nodes.mu.Unlock()
	nodes.refused, nodes.until = nil, time.Time{}
}
