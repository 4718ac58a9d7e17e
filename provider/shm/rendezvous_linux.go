package shm

import (
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// A place is one of the rendezvous of a TCP listener. Processes that share the listener
// stand in line there: the first serves, the second is about to take over from it.
type place int

const (
	first place = iota
	second
)

// rendezvous is the abstract unix address of a place at a TCP listener, which is named by
// its inode (see diag_linux.go). Abstract addresses, like TCP's ports, belong to
// the network namespace.
func rendezvous(inode uint32, at place) *net.UnixAddr {
	name := fmt.Sprintf("@san-shm/%d/%08x", version, inode)
	if at == second {
		name += "/next"
	}
	return &net.UnixAddr{Net: "unixpacket", Name: name}
}

// lookup are the places in the order in which a dialer tries them. The first again: the
// second may have become the first in between.
var lookup = [...]place{first, second, first}

// reach connects to the process that serves a TCP listener, without waiting.
func reach(inode uint32) (*net.UnixConn, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	f := os.NewFile(uintptr(fd), "rendezvous")
	defer f.Close()
	for _, at := range lookup {
		name := rendezvous(inode, at).Name
		if err = unix.Connect(fd, &unix.SockaddrUnix{Name: name}); err == nil {
			c, err := net.FileConn(f)
			if err != nil {
				return nil, err
			}
			return c.(*net.UnixConn), nil
		}
		if !errors.Is(err, unix.ECONNREFUSED) { // there is somebody
			break
		}
	}
	return nil, fmt.Errorf("shm: rendezvous %s: %w", rendezvous(inode, first), os.NewSyscallError("connect", err))
}

// An entrance is where dialing processes arrive: a socket at a place.
type entrance struct {
	unix   *net.UnixListener
	shut   chan struct{} // closed when it takes no more
	served chan struct{} // closed at the end of serve
}

// enter opens the entrance at a place, and serves it.
func (l *Listener) enter(at place) (*entrance, error) {
	name := rendezvous(l.inode, at)
	u, err := net.ListenUnix(name.Net, name)
	if err != nil {
		return nil, err
	}
	e := &entrance{unix: u, shut: make(chan struct{}), served: make(chan struct{})}
	go l.serve(e)
	return e, nil
}

// close closes the entrance. That also closes what dialing processes have sent before
// they were accepted, which may take as long as they like.
func (e *entrance) close() error {
	close(e.shut)
	e.unix.SetDeadline(time.Now()) // ends serve, which then closes nothing
	<-e.served
	closed := make(chan error, 1)
	go func() { closed <- e.unix.Close() }()
	late := time.NewTimer(closeTimeout)
	defer late.Stop()
	select {
	case err := <-closed:
		return err
	case <-late.C:
		return nil
	}
}
