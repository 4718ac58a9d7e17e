package regcache

import (
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// MemlockLimit returns RLIMIT_MEMLOCK, in bytes, and whether it applies to this
// process: the kernel does not count for holders of CAP_IPC_LOCK
// (drivers/infiniband/core/umem.c).
func MemlockLimit() (limit int64, limited bool) {
	var rlimit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &rlimit); err != nil || rlimit.Cur > 1<<62 {
		return 0, false
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var caps [2]unix.CapUserData
	if err := unix.Capget(&header, &caps[0]); err == nil && caps[0].Effective&(1<<unix.CAP_IPC_LOCK) != 0 && inInitialUserNamespace() {
		return 0, false
	}
	return int64(rlimit.Cur), true
}

// inInitialUserNamespace recognizes the initial user namespace by its fixed inode number
// (PROC_USER_INIT_INO, include/linux/proc_ns.h). ib_umem_get calls capable(), for which a
// capability in another namespace does not count.
func inInitialUserNamespace() bool {
	const initial = 0xEFFFFFFD
	var st unix.Stat_t
	if err := unix.Stat("/proc/self/ns/user", &st); err == nil {
		return st.Ino == initial
	}
	_, err := os.Stat("/proc/self/ns") // but no user in it: a kernel without user namespaces
	return err == nil
}

// memoryLimit is how many bytes of memory this process may have: the host's, or less in a
// container (memory.max at the root of its control groups, version 2). 0: it is not known.
func memoryLimit() (bytes int64) {
	var s unix.Sysinfo_t
	if err := unix.Sysinfo(&s); err == nil {
		bytes = int64(s.Totalram) * int64(s.Unit)
	}
	if text, err := os.ReadFile("/sys/fs/cgroup/memory.max"); err == nil {
		if most, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64); err == nil {
			bytes = min(bytes, most)
		}
	}
	return bytes
}
