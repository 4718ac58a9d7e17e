package shm

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// Mechanisms tries the kernel features that the provider uses, within this process, to
// explain why there are no connections or why they are slower.
func Mechanisms() []Mechanism {
	return []Mechanism{
		{"sock_diag", true, "finds the listener that TCP would reach", diagWorks()},
		{"memfd", true, "is the memory that two processes share", trySegment()},
		{"pidfd", false, "tells that the peer has died; without it, its socket's end does", tryPidfd()},
		{"process_vm_readv", false, "reads large buffers from the peer, where a threshold is set; without it, all goes through the ring", tryRead()},
	}
}

func trySegment() error {
	m, fd, err := newSegment(1)
	if err != nil {
		return err
	}
	unix.Close(fd)
	m.unmap()
	return nil
}

func tryPidfd() error {
	fd, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		return fmt.Errorf("shm: pidfd_open: %w", err)
	}
	return unix.Close(fd)
}

// tryRead reads this process's own memory, which always is permitted: if that fails, the
// system call is filtered. Then it checks the rule about other processes of this user.
func tryRead() error {
	at, want := localNonce()
	self := link{pid: os.Getpid(), nonceAt: at, nonce: want}
	var got nonce
	if err := self.readPeer(got[:], at); err != nil {
		return err
	}
	text, err := os.ReadFile("/proc/sys/kernel/yama/ptrace_scope")
	if err != nil {
		return nil // a kernel without Yama
	}
	return scopeError(strings.TrimSpace(string(text)), tracesAll())
}

// scopeError returns what a ptrace_scope (Documentation/admin-guide/LSM/Yama.rst) forbids
// to a process with or without CAP_SYS_PTRACE.
func scopeError(scope string, capable bool) error {
	switch {
	case scope == "0", capable && (scope == "1" || scope == "2"):
		return nil
	case scope == "1":
		return errors.New("shm: kernel.yama.ptrace_scope is 1: only descendants of this process may be read")
	}
	return fmt.Errorf("shm: kernel.yama.ptrace_scope is %s: no other process may be read", scope)
}

func tracesAll() bool {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var caps [2]unix.CapUserData
	err := unix.Capget(&header, &caps[0])
	return err == nil && caps[0].Effective&(1<<unix.CAP_SYS_PTRACE) != 0
}
