package verbs

import (
	"io/fs"
	"net/netip"
	"syscall"
	"testing"

	"github.com/sanconn/san/session"
)

// If device files may not be opened, that is the reason at once. The libraries would otherwise wait for
// five seconds each time.
func TestNodesThatMayNotBeOpened(t *testing.T) {
	before := tryNode
	t.Cleanup(func() { tryNode = before })
	for _, errno := range []syscall.Errno{syscall.EACCES, syscall.EPERM} { // from the file's mode, and from the devices cgroup
		tryNode = func(path string) error { return &fs.PathError{Op: "open", Path: path, Err: errno} }
		at := netip.MustParseAddrPort("127.0.0.1:1")
		if _, err := Dial(patient(t), netip.Addr{}, at, Config{}); reasonOf(err) != session.ReasonPermission {
			t.Errorf("%v: Dial: %v", errno, err)
		}
		tryNode = func(string) error { return nil }
		if err := nodesRefused(); err != nil {
			t.Errorf("%v: once it may be opened: %v", errno, err)
		}
	}
}

// Without descriptors the libraries would report that there is no device; the reason must be the lack of
// descriptors.
func TestNodesWithoutDescriptors(t *testing.T) {
	before := tryNode
	t.Cleanup(func() { tryNode = before })
	tryNode = func(path string) error { return &fs.PathError{Op: "open", Path: path, Err: syscall.EMFILE} }
	if err := nodesRefused(); reasonOf(err) != session.ReasonResources {
		t.Error(err)
	}
}
