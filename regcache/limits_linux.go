package regcache

import (
	"io/fs"
	"math"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// MemlockLimit returns RLIMIT_MEMLOCK, in bytes, and whether it applies to this process. The kernel
// does not count the memory of processes with CAP_IPC_LOCK (drivers/infiniband/core/umem.c).
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
	_, err := os.Stat("/proc/self/ns") // without the file user in it: a kernel without user namespaces
	return err == nil
}

// MemoryLimit returns how many bytes of memory this process may have: the host's, or less in a control
// group, such as a container's or a systemd unit's. It returns 0 if that is not known.
func MemoryLimit() (bytes int64) {
	var s unix.Sysinfo_t
	if err := unix.Sysinfo(&s); err == nil {
		bytes = int64(s.Totalram) * int64(s.Unit)
	}
	return min(bytes, groupLimit(os.DirFS("/")))
}

// groupLimit returns how many bytes of memory this process's control group may have, of version 1 or 2,
// or the largest number if there is no limit. Beyond memory.high the kernel kills no process, but
// delays the group's processes, the longer the further they are beyond it. root is the root of the file
// system. A container may see its group's path as the host does, or as its own root, and any group
// above may have a limit: so each ancestor that is visible is read.
func groupLimit(root fs.FS) int64 {
	limit := int64(math.MaxInt64)
	groups, err := fs.ReadFile(root, "proc/self/cgroup")
	if err != nil {
		return limit
	}
	for line := range strings.Lines(string(groups)) { // hierarchy:controllers:path
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(parts) != 3 {
			continue
		}
		mount, files := "", []string(nil)
		switch {
		case parts[0] == "0" && parts[1] == "":
			mount, files = "sys/fs/cgroup", []string{"memory.max", "memory.high"}
		case slices.Contains(strings.Split(parts[1], ","), "memory"):
			mount, files = "sys/fs/cgroup/memory", []string{"memory.limit_in_bytes"}
		default:
			continue
		}
		for group := path.Join("/", parts[2]); ; group = path.Dir(group) {
			for _, file := range files {
				if text, err := fs.ReadFile(root, path.Join(mount, group, file)); err == nil {
					if n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64); err == nil { // or the text is "max"
						limit = min(limit, n)
					}
				}
			}
			if group == "/" {
				break
			}
		}
	}
	return limit
}
