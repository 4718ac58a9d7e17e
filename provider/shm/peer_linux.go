package shm

import (
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// peerProcess is the process at the other end of a link, as far as the kernel tells.
type peerProcess struct {
	pid   int      // 0: not visible in this PID namespace
	uid   uint32   // overflowUID: perhaps a user that is not known here
	pidfd *os.File // nil, whose methods all fail: then only the control socket shows the end of the process
}

func newPeerProcess(socket syscall.RawConn) (p peerProcess, err error) {
	cred, err := peerCred(socket)
	if err != nil {
		return p, err
	}
	return peerProcess{int(cred.Pid), cred.Uid, peerPidfd(socket, int(cred.Pid))}, nil
}

// wait waits for the end of the process. The control socket may not show it, as a forked child can keep
// the socket open. An error means that the end is not known.
func (p *peerProcess) wait() error {
	rc, err := p.pidfd.SyscallConn()
	if err != nil {
		return err
	}
	return rc.Read(func(fd uintptr) bool {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(p, 0)
		return n > 0 && err == nil
	})
}

// peerCred returns the credentials of the process that made the other end of a unix socket; for a
// listener's, of the process that called listen.
func peerCred(rc syscall.RawConn) (cred *unix.Ucred, err error) {
	if e := rc.Control(func(fd uintptr) {
		cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); e != nil {
		return nil, e
	}
	return cred, err
}

// peerPidfd returns a pidfd of the peer's process that the runtime's poller waits for, or nil.
func peerPidfd(rc syscall.RawConn, pid int) *os.File {
	var fd int
	var err error
	if e := rc.Control(func(s uintptr) {
		// Since Linux 6.5. It is the only way to a process that is not visible in this PID namespace.
		fd, err = unix.GetsockoptInt(int(s), unix.SOL_SOCKET, unix.SO_PEERPIDFD)
	}); e != nil {
		return nil
	}
	if err != nil && pid > 0 {
		fd, err = unix.PidfdOpen(pid, 0) // since Linux 5.3
	}
	if err != nil {
		return nil
	}
	unix.CloseOnExec(fd)
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return nil
	}
	f := os.NewFile(uintptr(fd), "pidfd")
	if f.SetReadDeadline(time.Time{}) != nil { // Go's poller does not have it, and so would not tell the end
		f.Close()
		return nil
	}
	return f
}

// overflowUID stands for every user that a user namespace does not map (user_namespaces(7)). In a
// namespace that maps all users it is an ordinary user, "nobody".
const overflowUID = 65534

// oneUser reports whether uid stands for a single user.
func oneUser(uid uint32) bool { return uid != overflowUID || knowsAllUsers() }

// knowsAllUsers reports whether this user namespace maps all users. It is read once: a Go program
// cannot move to another user namespace, which only a process with one thread can do.
var knowsAllUsers = sync.OnceValue(func() bool {
	ids, err := os.ReadFile("/proc/self/uid_map")
	return err == nil && slices.Equal(strings.Fields(string(ids)), []string{"0", "0", "4294967295"})
})
