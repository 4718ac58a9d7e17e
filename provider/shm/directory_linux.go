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

// In a directory (Config.Dir) the names are socket files, which processes of other network
// namespaces find if both have the directory mounted. Those that processes have left which died,
// the next one of the port removes.
//
// Who the peer is the kernel may not tell here: its user may have no number in this user
// namespace. Who may enter the directory may be asked, and who may write to it may answer.

// socketMode lets the directory's owner and its group connect: where it has the set-group-ID bit,
// files in it are its group's.
const socketMode = 0o660

// directory is an open directory.
type directory struct{ *os.File }

// directoryError is why a directory cannot be used: it is not as it has to be, unless the error has a
// reason of its own, as of a file system that fails.
func directoryError(path string, err error) error {
	why := reason.Of(err).Reason
	if why == session.ReasonProtocol {
		why = session.ReasonPermission
	}
	return &session.Unavailable{Reason: why, Err: fmt.Errorf("%w: %s %w", ErrDirectory, path, err)}
}

// openDirectory opens a directory and checks who may change it.
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

// path is the path of a file in the directory that was opened, whatever has its name by now. It
// is short, as a unix socket's address has to be.
func (d directory) path(name string) string {
	return fmt.Sprintf("/proc/self/fd/%d/%s", d.fd(), name)
}

func (d directory) fd() int { return int(d.Fd()) }

// names returns those that begin with a prefix.
func (d directory) names(prefix string) ([]string, error) {
	files, err := d.Readdirnames(-1)
	if err != nil {
		err = directoryError(d.Name(), fmt.Errorf("cannot be read: %w", err))
	}
	return slices.DeleteFunc(files, func(name string) bool { return !strings.HasPrefix(name, prefix) }), err
}

// listenIn listens under a name in a directory, and removes others whose processes have died. giveUp
// has to be called when nobody accepts any more.
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

// clean removes names under which nobody listens, which do not come again. One under which somebody
// does refuses a socket of another type for that. It looks at MostNames: at those of the port, and then
// by chance at those of others, on which nobody may ever listen again. So hardly more than one in
// MostNames stays of a process that died, as each caller leaves one at most.
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

// A name is made in a directory of its own, ".NAME", as the file "socket". One that takes longer than
// unfinishedFor, some million times what it takes, is of a process that died.
const (
	inside        = "socket"
	unfinishedFor = time.Minute
)

// removeOld removes a directory in which nobody makes a name any more.
func (d directory) removeOld(own string) {
	if private, st, err := d.private(own); err == nil {
		defer private.Close()
		if time.Since(time.Unix(st.Mtim.Unix())) > unfinishedFor {
			unix.Unlinkat(private.fd(), inside, 0)
			unix.Unlinkat(d.fd(), own, unix.AT_REMOVEDIR)
		}
	}
}

// private opens a directory within this one.
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

// listen makes a socket that listens, under a name. It makes it in a directory of its own, so that
// nobody can have it change the mode of another file, or has a name that nobody listens under yet.
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
	defer unix.Unlinkat(fd, inside, 0) // which net leaves where listen or what follows fails
	if u, err = listenUnix(private.path(inside)); err != nil {
		return nil, err
	}
	u.SetUnlinkOnClose(false) // it will have another name
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
