package shm

import (
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// peerProcess is the process at the other end of a link, as the kernel knows it.
type peerProcess struct {
	pid   int      // 0: not visible here
	uid   uint32   // overflowUID: perhaps not known here
	pidfd *os.File // nil, of which each method fails: only the control socket shows its end
}

func newPeerProcess(socket syscall.RawConn) (p peerProcess, err error) {
	cred, err := peerCred(socket)
	if err != nil {
		return p, err
	}
	return peerProcess{int(cred.Pid), cred.Uid, peerPidfd(socket, int(cred.Pid))}, nil
}

// wait waits for the end of the process. The control socket may hide it, as a forked child
// can keep that open. It returns an error if it does not know.
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

// peerCred returns the credentials of the process that made the other end of a unix
// socket; of a listener's, the one that called listen.
func peerCred(rc syscall.RawConn) (cred *unix.Ucred, err error) {
	if e := rc.Control(func(fd uintptr) {
		cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); e != nil {
		return nil, e
	}
	return cred, err
}

// peerPidfd returns a pidfd of the peer's process, for the runtime's poller, or nil.
func peerPidfd(rc syscall.RawConn, pid int) *os.File {
	var fd int
	var err error
	if e := rc.Control(func(s uintptr) {
		// Linux 6.5. The only way for a process that is not visible here.
		fd, err = unix.GetsockoptInt(int(s), unix.SOL_SOCKET, unix.SO_PEERPIDFD)
	}); e != nil {
		return nil
	}
	if err != nil && pid > 0 {
		fd, err = unix.PidfdOpen(pid, 0) // Linux 5.3
	}
	if err != nil {
		return nil
	}
	unix.CloseOnExec(fd)
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return nil
	}
	return os.NewFile(uintptr(fd), "pidfd")
}

// overflowUID stands for every user that a user namespace does not map
// (user_namespaces(7)). In a namespace that maps all users it is a user, "nobody".
const overflowUID = 65534

// oneUser reports whether uid stands for a single user.
func oneUser(uid uint32) bool { return uid != overflowUID || knowsAllUsers() }

// knowsAllUsers reports whether this user namespace maps all users. It asks once: a Go
// program cannot move to another user namespace, which takes a single thread.
var knowsAllUsers = sync.OnceValue(func() bool {
	ids, err := os.ReadFile("/proc/self/uid_map")
	return err == nil && slices.Equal(strings.Fields(string(ids)), []string{"0", "0", "4294967295"})
})
