package shm

import (
	"context"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Mechanisms tries the kernel features that the provider uses, within this process, to explain why no
// connection is possible. It does not try the kernel's list of TCP sockets (tcp_diag).
func Mechanisms() []Mechanism {
	return []Mechanism{
		{"memfd", true, "is the memory that two processes share", trySegment()},
		{"pidfd", false, "tells that the peer has died; without it, its socket's end does", tryPidfd()},
		{"unix_diag", false, "finds who listens; without it, by the directory SAN_SHM_DIR alone", tryNames()},
	}
}

func trySegment() error {
	m, fd, err := newHalf(1, ownAccount(), false)
	if err != nil {
		return err
	}
	unix.Close(fd)
	m.unmap()
	return nil
}

func tryNames() error {
	_, err := Names(context.Background(), 0, 0, Config{})
	return err
}

func tryPidfd() error {
	fd, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		return fmt.Errorf("shm: pidfd_open: %w", err)
	}
	return unix.Close(fd)
}
