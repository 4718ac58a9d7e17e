package shm

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/reason"
	"github.com/sanconn/san/session"
)

// In a directory (Config.Dir) the names are socket files. Processes of two network namespaces find each
// other by them if both have the directory mounted. The next process of a port removes names that dead
// processes have left.
//
// The kernel may not know the peer's user here, as it may have no number in this user namespace. So the
// permissions of the directory decide: a process that may enter it, and connect to a socket there, may
// propose moves; one that may write to it may have a name, and so answer proposals.

// socketMode lets the directory's owner and its group connect. If the directory has the set-group-ID
// bit, files in it belong to its group.
const socketMode = 0o660

// directory is an open directory.
type directory struct{ *os.File }

// directoryError is why a directory cannot be used. The reason is ReasonPermission, unless err implies
// another one, as when a file system fails.
func directoryError(path string, err error) error {
	why := reason.Of(err).Reason
	if why == session.ReasonProtocol {
		why = session.ReasonPermission
	}
	return &session.Unavailable{Reason: why, Err: fmt.Errorf("%w: %s %w", ErrDirectory, path, err)}
}

// openDirectory opens a directory, and checks that only its owner and its group may change it.
func openDirectory(path string) (d directory, err error) {
	if !filepath.IsAbs(path) {
		return d, directoryError(path, errors.New("is no absolute path"))
	}
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return d, directoryError(path, fmt.Errorf("cannot be opened: %w", err))
	}
	d = directory{os.NewFile(uintptr(fd), path)}
	var st unix.Stat_t
	if err = unix.Fstat(fd, &st); err == nil {
		me := uint32(os.Geteuid())
		switch {
		case st.Uid != 0 && (st.Uid != me || !oneUser(me)):
			err = fmt.Errorf("is user %d's, and neither root's nor user %d's", st.Uid, me)
		case st.Mode&unix.S_IWOTH != 0:
			err = fmt.Errorf("is writable by everybody (mode %04o)", st.Mode&^unix.S_IFMT)
		}
	}
	if err != nil {
		d.Close()
		return d, directoryError(path, err)
	}
	return d, nil
}

// path returns the path of a file in the directory that was opened, even if another one has its name by
// now. The path is short, because a unix socket's address has to be.
func (d directory) path(name string) string {
	return fmt.Sprintf("/proc/self/fd/%d/%s", d.fd(), name)
}

func (d directory) fd() int { return int(d.Fd()) }

// names returns the directory's names with a prefix.
func (d directory) names(prefix string) ([]string, error) {
	files, err := d.Readdirnames(-1)
	if err != nil {
		err = directoryError(d.Name(), fmt.Errorf("cannot be read: %w", err))
	}
	return slices.DeleteFunc(files, func(name string) bool { return !strings.HasPrefix(name, prefix) }), err
}

// listenIn listens under a name in a directory, and removes names of dead processes. giveUp removes the
// name; it has to be called when nobody accepts any more.
func listenIn(dir, prefix, name string) (u *net.UnixListener, giveUp func(), err error) {
	d, err := openDirectory(dir)
	if err != nil {
		return nil, nil, err
	}
	d.clean(prefix)
	if u, err = d.listen(name); err != nil {
		d.Close()
		return nil, nil, err
	}
	return u, func() {
		unix.Unlinkat(d.fd(), name, 0)
		d.Close()
	}, nil
}

// clean removes names under which no process listens, which never come back. It finds them by a connect
// with a socket of another type, which a listening socket refuses with another error. It tries
// MostNames names: first those of the port, then, in random order, those of other ports, on which no
// process may ever listen again. Each caller leaves at most one name, so hardly more than one in
// MostNames stays.
func (d directory) clean(prefix string) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	files, _ := d.Readdirnames(-1)
	rand.Shuffle(len(files), func(i, j int) { files[i], files[j] = files[j], files[i] })
	looks := MostNames
	for _, prefix := range []string{prefix, anyPort} {
		for _, name := range files {
			unfinished := strings.HasPrefix(name, "."+prefix)
			if looks == 0 || !unfinished && !strings.HasPrefix(name, prefix) {
				continue
			}
			looks--
			if unfinished {
				d.removeOld(name)
			} else if unix.Connect(fd, &unix.SockaddrUnix{Name: d.path(name)}) == unix.ECONNREFUSED {
				unix.Unlinkat(d.fd(), name, 0)
			}
		}
	}
}

// A name is made in a directory of its own, ".NAME", as the file "socket". One that is older than
// unfinishedFor, a million times what making it takes, was left by a process that died.
const (
	inside        = "socket"
	unfinishedFor = time.Minute
)

// removeOld removes the directory of an unfinished name.
func (d directory) removeOld(own string) {
	if private, st, err := d.private(own); err == nil {
		defer private.Close()
		if time.Since(time.Unix(st.Mtim.Unix())) > unfinishedFor {
			unix.Unlinkat(private.fd(), inside, 0)
			unix.Unlinkat(d.fd(), own, unix.AT_REMOVEDIR)
		}
	}
}

// private opens a directory within d.
func (d directory) private(own string) (private directory, st unix.Stat_t, err error) {
	fd, err := unix.Openat(d.fd(), own, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return private, st, os.NewSyscallError("open", err)
	}
	private = directory{os.NewFile(uintptr(fd), own)}
	if err = unix.Fstat(fd, &st); err != nil {
		private.Close()
	}
	return private, st, os.NewSyscallError("fstat", err)
}

// listen makes a listening socket with a name. The socket is made in a directory of its own. So nobody
// can make this process change the mode of another file, and no name is visible before its process
// listens.
func (d directory) listen(name string) (u *net.UnixListener, err error) {
	own := "." + name
	if err := unix.Mkdirat(d.fd(), own, 0o700); err != nil {
		return nil, os.NewSyscallError("mkdir", err)
	}
	defer unix.Unlinkat(d.fd(), own, unix.AT_REMOVEDIR)
	private, st, err := d.private(own)
	if err != nil {
		return nil, err
	}
	defer private.Close()
	if st.Uid != uint32(os.Geteuid()) || st.Mode&0o077 != 0 {
		return nil, fmt.Errorf("shm: %s was exchanged: %w", own, unix.EPERM)
	}
	fd := private.fd()
	defer unix.Unlinkat(fd, inside, 0) // net leaves it if listen, or a later step, fails
	if u, err = listenUnix(private.path(inside)); err != nil {
		return nil, err
	}
	u.SetUnlinkOnClose(false) // it gets another name below
	err = unix.Fchmodat(fd, inside, socketMode, 0)
	if err == nil {
		err = unix.Renameat(fd, inside, d.fd(), name)
	}
	if err != nil {
		u.Close()
		return nil, fmt.Errorf("shm: %s: %w", name, err)
	}
	return u, nil
}
