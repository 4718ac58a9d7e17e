package ibv

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"syscall"
	"time"
)

// poller waits for a descriptor of the libraries in the runtime's poller. It uses a duplicate, because
// the libraries close theirs themselves.
type poller struct {
	file   *os.File
	raw    syscall.RawConn
	closed atomic.Bool
}

func newPoller(fd int, name string) (*poller, error) {
	dup, errno := sysPollable(fd)
	if errno != 0 {
		return nil, verbError("fcntl", name, errno)
	}
	file := os.NewFile(uintptr(dup), name)
	// NewFile does not report that epoll has refused the descriptor, for lack of memory or because of
	// fs.epoll.max_user_watches.
	if err := file.SetReadDeadline(time.Time{}); err != nil {
		file.Close()
		return nil, fmt.Errorf("ibv: %s: not to be waited for by epoll (memory, or sysctl fs.epoll.max_user_watches): %w: %w", name, err, syscall.ENOMEM)
	}
	raw, err := file.SyscallConn()
	if err != nil {
		file.Close()
		return nil, err
	}
	return &poller{file: file, raw: raw}, nil
}

// wait calls try, and again each time the descriptor becomes readable, until try returns true. The
// first call makes the edge-triggered poller safe. The argument of try is the duplicate, which try does
// not use.
func (p *poller) wait(try func(uintptr) bool) error {
	err := p.raw.Read(try)
	if err == nil {
		return nil
	}
	if p.closed.Load() && !errors.Is(err, os.ErrDeadlineExceeded) {
		err = os.ErrClosed // RawConn's own error for it is not exported
	}
	return fmt.Errorf("%s: %w", p.file.Name(), err)
}

func (p *poller) setDeadline(t time.Time) error { return p.file.SetReadDeadline(t) }

// close wakes wait, and returns when no try is running.
func (p *poller) close() {
	p.closed.Store(true)
	p.file.Close()
}
