package shm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/session"
)

// nameOf is the abstract unix address of a process that has accepted connections to a port.
// Abstract addresses, like TCP's ports, belong to the network namespace.
func nameOf(port uint16, number int) string {
	return fmt.Sprintf("@san-shm/%d/%d/%d", version, port, number)
}

// takeName takes the first name of a port that is free. The socket is made in the calling
// goroutine, whose thread may be in a network namespace of its own.
func takeName(port uint16) (u *net.UnixListener, number int, err error) {
	for number := range Numbers {
		l, err := listenConfig.Listen(context.Background(), "unixpacket", nameOf(port, number))
		if err == nil {
			return l.(*net.UnixListener), number, nil
		}
		if !errors.Is(err, unix.EADDRINUSE) {
			return nil, 0, err
		}
	}
	return nil, 0, &session.Unavailable{Reason: session.ReasonResources,
		Err: fmt.Errorf("shm: all %d names of port %d are taken: %w", Numbers, port, unix.EADDRINUSE)}
}

// listenConfig has each message to a listener's sockets bring who has sent it.
var listenConfig = net.ListenConfig{Control: func(_, _ string, rc syscall.RawConn) (err error) {
	if e := rc.Control(func(fd uintptr) { err = passCredentials(int(fd)) }); e != nil {
		return e
	}
	return err
}}

// connect connects to the process that has a name, without waiting.
func (k linkKey) connect() (*net.UnixConn, error) {
	if k.dir != "" {
		return connectFile(k.dir, k.port, k.number)
	}
	return connectName(k.port, k.number, k.user)
}

// connectName connects to the process that has a name, without waiting, if that may be the
// user's. The socket is made in the calling goroutine, as in takeName.
//
// What the kernel knows so far is who called listen: the user, or root, who may have dropped
// its privileges since (identify). Anybody may have taken a name, but costs no more than this.
func connectName(port uint16, number int, user uint32) (*net.UnixConn, error) {
	name := nameOf(port, number)
	return connectUnix(name, name, func(uid uint32) error {
		if uid != user && uid != 0 {
			return errOwner(uid, user)
		}
		return nil
	})
}

// connectUnix connects to a unix socket, without waiting; errors call it by a name. check is
// asked about who called listen.
func connectUnix(address, name string, check func(uid uint32) error) (*net.UnixConn, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	f := os.NewFile(uintptr(fd), "link")
	defer f.Close()
	if err := passCredentials(fd); err != nil {
		return nil, err
	}
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: address}); err != nil {
		return nil, fmt.Errorf("shm: %s: %w", name, os.NewSyscallError("connect", err))
	}
	cred, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return nil, os.NewSyscallError("getsockopt", err)
	}
	if err := check(cred.Uid); err != nil {
		return nil, err
	}
	c, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	return c.(*net.UnixConn), nil
}

func errOwner(got, want uint32) error {
	return &session.Unavailable{Reason: session.ReasonOwner,
		Err: fmt.Errorf("shm: the process is user %d's, and not user %d's", got, want)}
}

// NetworkNamespace identifies that of the calling thread; 0: it is not known, without /proc.
func NetworkNamespace() uint64 {
	var st unix.Stat_t
	if unix.Stat("/proc/thread-self/ns/net", &st) != nil {
		return 0
	}
	return st.Ino
}
