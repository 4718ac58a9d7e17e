package siege

import (
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// call is a system call that is to fail.
type call struct {
	Number uint32
	Arg    int    // the argument that distinguishes it from other calls of this number; -1: none
	Value  uint32 // the low half of that argument
	Errno  uint32 // the error that it returns
}

// calls are the system calls that shared memory needs, without those that TCP needs as well.
var calls = map[string]call{
	"memfd_create":            {Number: unix.SYS_MEMFD_CREATE, Arg: -1},
	"ftruncate":               {Number: unix.SYS_FTRUNCATE, Arg: -1},
	"fchmod":                  {Number: unix.SYS_FCHMOD, Arg: -1},
	"fcntl F_ADD_SEALS":       {Number: unix.SYS_FCNTL, Arg: 1, Value: unix.F_ADD_SEALS},
	"fcntl F_GET_SEALS":       {Number: unix.SYS_FCNTL, Arg: 1, Value: unix.F_GET_SEALS},
	"fcntl F_DUPFD_CLOEXEC":   {Number: unix.SYS_FCNTL, Arg: 1, Value: unix.F_DUPFD_CLOEXEC},
	"fstat":                   {Number: unix.SYS_FSTAT, Arg: -1},
	"fstatfs":                 {Number: unix.SYS_FSTATFS, Arg: -1},
	"mmap MAP_SHARED":         {Number: unix.SYS_MMAP, Arg: 3, Value: unix.MAP_SHARED | unix.MAP_NORESERVE},
	"madvise MADV_DONTFORK":   {Number: unix.SYS_MADVISE, Arg: 2, Value: unix.MADV_DONTFORK},
	"madvise MADV_REMOVE":     {Number: unix.SYS_MADVISE, Arg: 2, Value: unix.MADV_REMOVE},
	"eventfd2":                {Number: unix.SYS_EVENTFD2, Arg: -1},
	"preadv2":                 {Number: unix.SYS_PREADV2, Arg: -1},
	"pidfd_open":              {Number: unix.SYS_PIDFD_OPEN, Arg: -1},
	"poll":                    {Number: map[string]uint32{"amd64": 7, "arm64": 73}[runtime.GOARCH], Arg: -1},
	"prlimit64":               {Number: unix.SYS_PRLIMIT64, Arg: -1},
	"socket AF_NETLINK":       {Number: unix.SYS_SOCKET, Arg: 0, Value: unix.AF_NETLINK},
	"socket AF_UNIX":          {Number: unix.SYS_SOCKET, Arg: 0, Value: unix.AF_UNIX},
	"socketpair":              {Number: unix.SYS_SOCKETPAIR, Arg: -1},
	"sendto":                  {Number: unix.SYS_SENDTO, Arg: -1},
	"recvfrom":                {Number: unix.SYS_RECVFROM, Arg: -1},
	"sendmsg":                 {Number: unix.SYS_SENDMSG, Arg: -1},
	"recvmsg":                 {Number: unix.SYS_RECVMSG, Arg: -1},
	"getsockopt SO_PEERCRED":  {Number: unix.SYS_GETSOCKOPT, Arg: 2, Value: unix.SO_PEERCRED},
	"getsockopt SO_PEERPIDFD": {Number: unix.SYS_GETSOCKOPT, Arg: 2, Value: unix.SO_PEERPIDFD},
	"getsockopt SO_PROTOCOL":  {Number: unix.SYS_GETSOCKOPT, Arg: 2, Value: unix.SO_PROTOCOL},
	"getsockopt SO_DOMAIN":    {Number: unix.SYS_GETSOCKOPT, Arg: 2, Value: unix.SO_DOMAIN},
	"getsockopt TCP_INFO":     {Number: unix.SYS_GETSOCKOPT, Arg: 2, Value: unix.TCP_INFO},
	"getsockopt SO_COOKIE":    {Number: unix.SYS_GETSOCKOPT, Arg: 2, Value: unix.SO_COOKIE},
	"setsockopt SO_PASSCRED":  {Number: unix.SYS_SETSOCKOPT, Arg: 2, Value: unix.SO_PASSCRED},
	"getsockopt NETNS_COOKIE": {Number: unix.SYS_GETSOCKOPT, Arg: 2, Value: unix.SO_NETNS_COOKIE},
}

// forbid makes a system call fail from now on, in all threads.
func forbid(c call) error {
	const nr, args = 0, 16                                      // offsets in struct seccomp_data
	low := func(arg int) uint32 { return uint32(args + 8*arg) } // little endian
	fail := uint32(unix.SECCOMP_RET_ERRNO | c.Errno)
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: nr},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: c.Number, Jt: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	if c.Arg >= 0 {
		filter = append(filter,
			unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: low(c.Arg)},
			unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: c.Value, Jt: 1},
			unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW})
	}
	filter = append(filter, unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: fail})
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER,
		unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&program)))
	if errno != 0 {
		return fmt.Errorf("seccomp: %w", errno)
	}
	return nil
}
