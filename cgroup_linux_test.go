package san

import (
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/provider/shm"
)

// A BPF program of a control group changes what connect does, as Cilium and others use it to balance
// load: 7001 becomes 7000, and 7002 is forbidden.
func TestControlGroupsConnect(t *testing.T) {
	inside, done := inProcess(t, "ip link set lo up", func(c *exec.Cmd) {
		testenv.NeedRoot(t)
		c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS}
	})
	if !inside {
		return
	}
	defer done()
	onlyShm(t)
	leave := joinControlGroup(t)
	defer leave()
	serve(t, &ListenConfig{}, "127.0.0.1:7000", 0)
	serve(t, &ListenConfig{}, "127.0.0.1:7001", 1) // a listener that nobody reaches
	serve(t, &ListenConfig{}, "127.0.0.1:7002", 2)
	wantReachedBy(t, atOnce(), "127.0.0.1:7000", 0, shm.Name)
	wantReachedBy(t, atOnce(), "127.0.0.1:7001", 0, shm.Name)
	wantSameError(t, "127.0.0.1:7002")
}

// joinControlGroup makes a control group with the program, and moves this process into it.
func joinControlGroup(t *testing.T) (leave func()) {
	t.Helper()
	root := t.TempDir()
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("none", root, "cgroup2", 0, ""); err != nil {
		testenv.MissingKernel(t, "cgroup2: "+err.Error())
	}
	group := fmt.Sprintf("%s/san-test-%d", root, os.Getpid())
	if err := os.Mkdir(group, 0o700); err != nil {
		t.Fatal(err)
	}
	join := func(group string) error { return os.WriteFile(group+"/cgroup.procs", []byte("0"), 0) }
	leave = func() {
		join(root)
		if err := os.Remove(group); err != nil {
			t.Error(err)
		}
		unix.Unmount(root, unix.MNT_DETACH)
	}
	err := join(group)
	if err == nil {
		err = attachConnect(group)
	}
	if err != nil {
		leave()
		testenv.MissingKernel(t, "programs of the kernel's for connect: "+err.Error())
	}
	return leave
}

// attachConnect attaches the program. Package unix has neither bpf(2) nor its instructions.
func attachConnect(group string) error {
	port := func(p uint16) int32 { // the encoding of a port in struct bpf_sock_addr
		return int32(binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, p)))
	}
	type instruction struct {
		code, registers uint8 // source and destination
		offset          int16
		constant        int32
	}
	const (
		load, store, set, ifEqual, ifNot, exit = 0x61, 0x63, 0xb7, 0x15, 0x55, 0x95
		result, context, was, becomes          = 0, 1, 2, 3 // registers
		userPort                               = 24         // offset of user_port in the context
	)
	program := []instruction{
		{load, context<<4 | was, userPort, 0},
		{ifEqual, was, 5, port(7002)}, // … to the refusal
		{ifNot, was, 2, port(7001)},   // … to the end
		{set, becomes, 0, port(7000)},
		{store, becomes<<4 | context, userPort, 0},
		{set, result, 0, 1},
		{exit, 0, 0, 0},
		{set, result, 0, 0},
		{exit, 0, 0, 0},
	}
	license := []byte("Dual MIT/GPL\x00")
	const (
		progLoad, progAttach = 5, 8
		cgroupSockAddr       = 18
		inet4Connect         = 10
	)
	loading := struct {
		kind, count             uint32
		program, license        uint64
		logLevel, logSize       uint32
		log                     uint64
		version, flags          uint32
		name                    [16]byte
		interfaceIndex, attachs uint32
	}{
		kind: cgroupSockAddr, count: uint32(len(program)), attachs: inet4Connect,
		program: uint64(uintptr(unsafe.Pointer(&program[0]))), license: uint64(uintptr(unsafe.Pointer(&license[0]))),
	}
	fd, _, errno := unix.Syscall(unix.SYS_BPF, progLoad, uintptr(unsafe.Pointer(&loading)), unsafe.Sizeof(loading))
	if errno != 0 {
		return os.NewSyscallError("bpf", errno)
	}
	defer unix.Close(int(fd))
	dir, err := os.Open(group)
	if err != nil {
		return err
	}
	defer dir.Close()
	attaching := struct{ target, program, kind, flags uint32 }{uint32(dir.Fd()), uint32(fd), inet4Connect, 0}
	if _, _, errno := unix.Syscall(unix.SYS_BPF, progAttach, uintptr(unsafe.Pointer(&attaching)), unsafe.Sizeof(attaching)); errno != 0 {
		return os.NewSyscallError("bpf", errno)
	}
	return nil
}
