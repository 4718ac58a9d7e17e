package verbs

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/sanconn/san/internal/rdmalink"
	"github.com/sanconn/san/internal/reason"
	"github.com/sanconn/san/session"
)

// The device files that rdma-core's libraries open. If the libraries cannot open one, they wait for
// udev to make it: five seconds each (open_cdev in util/open_cdev.c), which nothing shortens. So this
// package checks beforehand whether this process may open them.
const (
	cmNode     = "/dev/infiniband/rdma_cm"
	cmClass    = "/sys/class/misc/rdma_cm" // the kernel has rdma_cm
	verbsNodes = "/dev/infiniband/uverbs*"
)

// tryNode opens and closes a device file. Tests replace it.
var tryNode = func(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err == nil {
		f.Close()
	}
	return err
}

// nodesRefused returns why this process may not open rdma_cm, or any device, or cannot for lack of
// descriptors; nil if it may, or if there are none.
func nodesRefused() error {
	if rdmalink.Simulated != nil {
		return nil // which has no files
	}
	if err := cannotLook(); err != nil {
		return err
	}
	err := tryNode(cmNode)
	_, none := os.Stat(cmClass)
	if errors.Is(err, fs.ErrPermission) || errors.Is(err, fs.ErrNotExist) && none == nil { // the file is not in this container
		return refusedNode(err)
	}
	devices, _ := filepath.Glob(verbsNodes)
	for _, path := range devices {
		if err = tryNode(path); !errors.Is(err, fs.ErrPermission) {
			return nil // one is enough
		}
	}
	if len(devices) > 0 {
		return refusedNode(err)
	}
	return nil
}

// cannotLook returns why devices cannot be found now: without descriptors neither sysfs nor the
// libraries show any. nil: they can.
func cannotLook() error {
	if why := reason.Of(tryNode(os.DevNull)); why.Reason == session.ReasonResources {
		return why
	}
	return nil
}

// searched calls find, and returns why its result may be incomplete: its error, or that descriptors
// were lacking before or after the call.
func searched(find func() error) error {
	before := cannotLook()
	return cmp.Or(before, find(), cannotLook())
}

func refusedNode(err error) error {
	return unavailable(session.ReasonPermission, errWithoutErrno{fmt.Errorf("verbs: %w", err)})
}
